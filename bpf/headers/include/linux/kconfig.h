/* SPDX-License-Identifier: GPL-2.0
 *
 * BCC includes this first, from the kernel's headers. The programs here read no kernel structs, so that this folder,
 * given as BCC_KERNEL_SOURCE, stands in for them: it holds what BCC's own prelude needs, and nothing else.
 */
#ifndef SCHEDTRACE_KCONFIG_H
#define SCHEDTRACE_KCONFIG_H

#define CONFIG_BPF_SYSCALL 1

#endif

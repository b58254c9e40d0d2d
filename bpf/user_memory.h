/* SPDX-License-Identifier: GPL-2.0
 *
 * bpf_probe_read_user by another name. Where BCC sees that one it reads all of /proc/kallsyms, to learn whether the kernel
 * has it (all since 5.5 do): a fifth of the time to compile.
 */
#ifndef SCHEDTRACE_USER_MEMORY_H
#define SCHEDTRACE_USER_MEMORY_H

static long (*read_user)(void *to, __u32 size, const void *from) = (void *)BPF_FUNC_probe_read_user;

#endif

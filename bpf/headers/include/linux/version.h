/* SPDX-License-Identifier: GPL-2.0
 *
 * Only for BCC's prelude. It asks for the version to choose between spellings of tracepoint fields; the programs here
 * need none of that. 5.10 is the oldest kernel supported.
 */
#ifndef LINUX_VERSION_CODE
#define LINUX_VERSION_CODE 0x050a00
#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + (c))
#endif

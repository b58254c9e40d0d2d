/* SPDX-License-Identifier: GPL-2.0
 *
 * Go's register ABI (ABIInternal, Go 1.17 on amd64, 1.18 on arm64): where a function finds its first arguments and the
 * current g. https://go.dev/s/regabi and src/cmd/compile/abi-internal.md in the Go tree.
 */
#ifndef SCHEDTRACE_GOABI_H
#define SCHEDTRACE_GOABI_H

#if defined(__x86_64__)
#define GO_ARG0(ctx) ((ctx)->ax)
#define GO_ARG1(ctx) ((ctx)->bx)
#define GO_ARG2(ctx) ((ctx)->cx)
#define GO_ARG3(ctx) ((ctx)->di)
#define GO_CURRENT_G(ctx) ((ctx)->r14)
#define PROBED_ADDRESS(ctx) ((ctx)->ip)
/* A direct call in the bytes before `pc`, and where it goes. */
#define CALL_SIZE 5
#define IS_CALL(bytes) ((bytes)[0] == 0xe8)
#define CALLED(bytes, pc) ((pc) + (__s64)(__s32)((bytes)[1] | (bytes)[2] << 8 | (bytes)[3] << 16 | (__u32)(bytes)[4] << 24))
#elif defined(__aarch64__)
#define GO_ARG0(ctx) ((ctx)->regs[0])
#define GO_ARG1(ctx) ((ctx)->regs[1])
#define GO_ARG2(ctx) ((ctx)->regs[2])
#define GO_ARG3(ctx) ((ctx)->regs[3])
#define GO_CURRENT_G(ctx) ((ctx)->regs[28])
#define PROBED_ADDRESS(ctx) ((ctx)->pc)
#define CALL_SIZE 4
#define CALL_WORD(bytes) ((bytes)[0] | (bytes)[1] << 8 | (bytes)[2] << 16 | (__u32)(bytes)[3] << 24)
#define IS_CALL(bytes) (CALL_WORD(bytes) >> 26 == 0x25)
#define CALLED(bytes, pc) ((pc) - 4 + (__s64)((__s32)(CALL_WORD(bytes) << 6) >> 4))
#else
#error "schedtrace knows Go's register ABI on x86-64 and arm64 only"
#endif

#endif

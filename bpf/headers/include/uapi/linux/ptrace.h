/* SPDX-License-Identifier: GPL-2.0
 *
 * The registers that a uprobe's program is handed: user ABI, laid out by the architecture and never changed.
 */
#ifndef SCHEDTRACE_PTRACE_H
#define SCHEDTRACE_PTRACE_H

#if defined(__x86_64__)
struct pt_regs {
	unsigned long r15;
	unsigned long r14;
	unsigned long r13;
	unsigned long r12;
	unsigned long bp;
	unsigned long bx;
	unsigned long r11;
	unsigned long r10;
	unsigned long r9;
	unsigned long r8;
	unsigned long ax;
	unsigned long cx;
	unsigned long dx;
	unsigned long si;
	unsigned long di;
	unsigned long orig_ax;
	unsigned long ip;
	unsigned long cs;
	unsigned long flags;
	unsigned long sp;
	unsigned long ss;
};
#elif defined(__aarch64__)
struct user_pt_regs {
	unsigned long long regs[31];
	unsigned long long sp;
	unsigned long long pc;
	unsigned long long pstate;
};
#define pt_regs user_pt_regs
#endif

#endif

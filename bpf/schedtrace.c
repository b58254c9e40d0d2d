/* SPDX-License-Identifier: GPL-2.0
 *
 * The programs. One per probed function of the Go runtime, named on_<function>; plan.py decides which of them a binary
 * needs, so that each change of state is reported exactly once. Most run on g0, so the goroutine is an argument.
 * Only those that are asked for (-DWITH_ON_...) are compiled. No kernel header is needed: only pt_regs, tracepoint
 * arguments and user memory are read.
 */
#include <uapi/linux/ptrace.h>
#include "types.h"
#include "goabi.h"
#include "maps.h"
#include "goroutine.h"
#include "thread.h"

/* casgstatus(gp, old, new): sees the move before the CAS is made. */
#ifdef WITH_ON_CASGSTATUS
int on_casgstatus(struct pt_regs *ctx)
{
	__u64 gp = GO_ARG0(ctx);
	struct move move = { .from = (__u32)GO_ARG1(ctx) & 0xf, .to = (__u32)GO_ARG2(ctx) & 0xf };
	struct hit hit;
	struct goroutine *g;

	if (!begin(&hit, PROBED_ADDRESS(ctx)))
		return 0;
	if (move.from == STATE_DEADEXTRA)
		move.from = STATE_DEAD;
	if (move.to == STATE_DEADEXTRA)
		move.to = STATE_DEAD;
	/* A new g before its life, a growing stack, a leak report: no change of what the goroutine is doing. */
	if (move.from == STATE_IDLE || move.from == STATE_COPYSTACK || move.to == STATE_COPYSTACK ||
	    move.to == STATE_LEAKED || move.from == move.to) {
		count(hit.stats, move.from, move.to);
		return 0;
	}
	g = follow(&hit, gp);
	if (!g)
		count(hit.stats, move.from, move.to);
	else if (understand(&hit, gp, g, &move))
		make(&hit, gp, g, move);
	return 0;
}
#endif

/* park_m(gp): the running goroutine waits; gopark has stored the reason. */
#ifdef WITH_ON_PARK_M
int on_park_m(struct pt_regs *ctx)
{
	__u64 gp = GO_ARG0(ctx);
	struct move move = {};
	struct hit hit;
	struct goroutine *g;

	if (!begin(&hit, PROBED_ADDRESS(ctx)))
		return 0;
	g = follow(&hit, gp);
	if (g && park(&hit, gp, &move))
		make(&hit, gp, g, move);
	return 0;
}
#endif

/* ready(gp, traceskip, next) */
#ifdef WITH_ON_READY
int on_ready(struct pt_regs *ctx)
{
	__u64 gp = GO_ARG0(ctx);
	struct move move = {};
	struct hit hit;
	struct goroutine *g;

	if (!begin(&hit, PROBED_ADDRESS(ctx)))
		return 0;
	g = follow(&hit, gp);
	if (g && wake(&hit, gp, g, &move))
		make(&hit, gp, g, move);
	return 0;
}
#endif

/* injectglist(glist *gList): all goroutines on the list become runnable; they are chained by g.schedlink. */
#ifdef WITH_ON_INJECTGLIST
int on_injectglist(struct pt_regs *ctx)
{
	__u64 gp = GO_ARG0(ctx);
	struct move move = {};
	struct hit hit;
	struct goroutine *g;

	if (!begin(&hit, PROBED_ADDRESS(ctx)))
		return 0;
	gp = read_word(&hit, gp, 0);
	for (int i = 0; i < INJECT_LIMIT; i++) {
		if (!gp)
			return 0;
		g = follow(&hit, gp);
		if (g && wake(&hit, gp, g, &move))
			make(&hit, gp, g, move);
		gp = read_word(&hit, gp, hit.target->g_schedlink);
	}
	if (gp)
		lost(hit.stats, LOST_LIST_TOO_LONG);
	return 0;
}
#endif

/* execute(gp, inheritTime): it runs. The scheduler readies some goroutines itself and runs them at once (the first one
 * netpoll returns, GC workers, a park whose unlock failed): those come here from waiting, and have waited for nothing. */
#ifdef WITH_ON_EXECUTE
int on_execute(struct pt_regs *ctx)
{
	__u64 gp = GO_ARG0(ctx);
	struct move move = {};
	struct hit hit;
	struct goroutine *g;

	if (!begin(&hit, PROBED_ADDRESS(ctx)))
		return 0;
	g = follow(&hit, gp);
	if (!g)
		return 0;
	if ((g->state == STATE_WAITING || g->state == STATE_PREEMPTED) && wake(&hit, gp, g, &move))
		make(&hit, gp, g, move);
	move = (struct move){ .from = STATE_RUNNABLE, .to = STATE_RUNNING };
	make(&hit, gp, g, move);
	return 0;
}
#endif

static __always_inline int new_goroutine(struct pt_regs *ctx, __u64 gp)
{
	struct move move = { .from = STATE_DEAD, .to = STATE_RUNNABLE, .cause = CAUSE_NEW };
	struct hit hit;
	struct goroutine *g;

	if (!begin(&hit, PROBED_ADDRESS(ctx)))
		return 0;
	g = follow(&hit, gp);
	if (g)
		make(&hit, gp, g, move);
	return 0;
}

/* At newproc's call of runqput(pp, gp, next): gp is the goroutine that newproc1 has just made. */
#ifdef WITH_ON_NEWPROC
int on_newproc(struct pt_regs *ctx)
{
	return new_goroutine(ctx, GO_ARG1(ctx));
}
#endif

/* In newproc, behind its call of newproc1, whose result is the new goroutine. */
#ifdef WITH_ON_NEWPROC1_RETURNED
int on_newproc1_returned(struct pt_regs *ctx)
{
	return new_goroutine(ctx, GO_ARG0(ctx));
}
#endif

/* goschedImpl(gp, preempted): Gosched, or preemption of a goroutine that ran for too long. */
#ifdef WITH_ON_GOSCHEDIMPL
int on_goschedimpl(struct pt_regs *ctx)
{
	__u64 gp = GO_ARG0(ctx);
	struct move move = {};
	struct hit hit;
	struct goroutine *g;

	if (!begin(&hit, PROBED_ADDRESS(ctx)))
		return 0;
	g = follow(&hit, gp);
	if (g && give_up_processor(&hit, gp, &move))
		make(&hit, gp, g, move);
	return 0;
}
#endif

/* goyield_m(gp) */
#ifdef WITH_ON_GOYIELD_M
int on_goyield_m(struct pt_regs *ctx)
{
	__u64 gp = GO_ARG0(ctx);
	struct move move = {};
	struct hit hit;
	struct goroutine *g;

	if (!begin(&hit, PROBED_ADDRESS(ctx)))
		return 0;
	g = follow(&hit, gp);
	if (g && give_up_processor(&hit, gp, &move))
		make(&hit, gp, g, move);
	return 0;
}
#endif

/* preemptPark(gp): stopped at a safe point for suspendG (its stack is to be scanned), until it is readied. */
#ifdef WITH_ON_PREEMPTPARK
int on_preemptpark(struct pt_regs *ctx)
{
	__u64 gp = GO_ARG0(ctx);
	struct move move = {};
	struct hit hit;
	struct goroutine *g;

	if (!begin(&hit, PROBED_ADDRESS(ctx)))
		return 0;
	move = (struct move){ .from = STATE_RUNNING, .to = STATE_PREEMPTED };
	g = follow(&hit, gp);
	if (g)
		make(&hit, gp, g, move);
	return 0;
}
#endif

/* gdestroy(gp), goexit0(gp) up to Go 1.21 */
#ifdef WITH_ON_GDESTROY
int on_gdestroy(struct pt_regs *ctx)
{
	__u64 gp = GO_ARG0(ctx);
	struct move move = {};
	struct hit hit;
	struct goroutine *g;

	if (!begin(&hit, PROBED_ADDRESS(ctx)))
		return 0;
	move = (struct move){ .from = STATE_RUNNING, .to = STATE_DEAD };
	g = follow(&hit, gp);
	if (g)
		make(&hit, gp, g, move);
	return 0;
}
#endif

/* exitsyscallNoP(gp), exitsyscall0(gp) up to Go 1.25: back from a system call, and no P is free. */
#ifdef WITH_ON_EXITSYSCALL_NOP
int on_exitsyscall_nop(struct pt_regs *ctx)
{
	__u64 gp = GO_ARG0(ctx);
	struct move move = {};
	struct hit hit;
	struct goroutine *g;

	if (!begin(&hit, PROBED_ADDRESS(ctx)))
		return 0;
	g = follow(&hit, gp);
	if (g && return_without_p(g, &move))
		make(&hit, gp, g, move);
	return 0;
}
#endif

/* coroswitch_m(gp): gp stops here, or ends, and the goroutine held by its coroutine runs in its place, at once. */
#ifdef WITH_ON_COROSWITCH_M
int on_coroswitch_m(struct pt_regs *ctx)
{
	__u64 gp = GO_ARG0(ctx), coroutine, next;
	struct move move = {};
	struct hit hit;
	struct goroutine *g;

	if (!begin(&hit, PROBED_ADDRESS(ctx)))
		return 0;
	coroutine = read_word(&hit, gp, hit.target->g_coroarg);
	if (!coroutine) {
		lost(hit.stats, LOST_UNREADABLE);
		return 0;
	}
	next = read_word(&hit, coroutine, hit.target->coro_gp);
	if (!read_byte(&hit, gp, hit.target->g_coroexit, 0)) {
		/* else gdestroy is called, which is seen on its own */
		move = (struct move){ STATE_RUNNING, STATE_WAITING, 0, hit.target->coroutine_reason };
		g = follow(&hit, gp);
		if (g) {
			make(&hit, gp, g, move);
			g->switched = SWITCH_OUT;
		}
	}
	if (!next)
		return 0;
	g = follow(&hit, next);
	if (g) {
		if (g->state == STATE_UNSEEN)
			g->reason = hit.target->coroutine_reason;
		move = (struct move){ STATE_WAITING, STATE_RUNNING, 0, 0 };
		make(&hit, next, g, move);
		g->switched = SWITCH_IN;
	}
	return 0;
}
#endif

/* reentersyscall and exitsyscall run on the goroutine's own stack: it is the current g. */
#ifdef WITH_ON_REENTERSYSCALL
int on_reentersyscall(struct pt_regs *ctx)
{
	__u64 gp = GO_CURRENT_G(ctx);
	struct move move = {};
	struct hit hit;
	struct goroutine *g;

	if (!begin(&hit, PROBED_ADDRESS(ctx)))
		return 0;
	g = follow(&hit, gp);
	if (g && enter_syscall(g, &move))
		make(&hit, gp, g, move);
	return 0;
}
#endif

#ifdef WITH_ON_EXITSYSCALL
int on_exitsyscall(struct pt_regs *ctx)
{
	__u64 gp = GO_CURRENT_G(ctx);
	struct move move = {};
	struct hit hit;
	struct goroutine *g;

	if (!begin(&hit, PROBED_ADDRESS(ctx)))
		return 0;
	g = follow(&hit, gp);
	if (g && leave_syscall(g, &move))
		make(&hit, gp, g, move);
	return 0;
}
#endif

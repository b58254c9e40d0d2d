/* SPDX-License-Identifier: GPL-2.0
 *
 * Which move a hit reports. All functions here return 0 if it reports none.
 */
#ifndef SCHEDTRACE_MOVES_H
#define SCHEDTRACE_MOVES_H

#include "goabi.h"
#include "goroutine.h"

/* Waiting -> runnable: the reason it waited for is the cause of the wake. A goroutine stopped by preemptPark is moved
 * from preempted to waiting by suspendG's own CAS before it is readied: that is the end of a preemption, not of a wait. */
static __always_inline int wake(struct hit *hit, __u64 gp, struct goroutine *g, struct move *move)
{
	if (g->state == STATE_PREEMPTED) {
		move->cause = CAUSE_PREEMPTED;
	} else {
		if (g->state != STATE_WAITING)
			g->reason = read_reason(hit, gp);
		move->cause = hit->target->cause_of_reason[g->reason & (REASON_COUNT - 1)];
	}
	move->from = move->cause == CAUSE_PREEMPTED ? STATE_PREEMPTED : STATE_WAITING;
	move->to = STATE_RUNNABLE;
	return 1;
}

/* Running -> waiting; no move if the reason is one for which the goroutine in fact runs on the system stack. */
static __always_inline int park(struct hit *hit, __u64 gp, struct move *move)
{
	move->reason = read_reason(hit, gp);
	return !(hit->target->running_reasons & (1ULL << (move->reason & (REASON_COUNT - 1))));
}

/* Running -> runnable by its own wish or not. preemptone sets g.preempt and only execute clears it. A goroutine that yields
 * while it is asked to (Gosched makes no stack check of its own) grants the request: that counts as preempted. One that is
 * stopped by a request meant for the goroutine that ran on its P before (p.preempt alone is set; 1 in thousands) counts as
 * yielded. */
static __always_inline int give_up_processor(struct hit *hit, __u64 gp, struct move *move)
{
	move->cause = read_byte(hit, gp, hit->target->g_preempt, 0) ? CAUSE_PREEMPTED : CAUSE_YIELDED;
	return 1;
}

/* Waiting -> running without having been runnable: the runtime called it waiting while it ran on the system stack.
 * From Go 1.20 the reason says so and park() let it pass. Before, the reason is stale: the park is taken back. */
static __always_inline int resume_on_system_stack(struct hit *hit, __u64 gp, struct goroutine *g)
{
	if (g->state == STATE_WAITING) {
		add(&hit->stats->transitions[STATE_RUNNING * STATE_COUNT + STATE_WAITING], -1ULL);
		g->totals.parks--;
		g->state = STATE_RUNNING;
		send_transition(hit, gp, (struct transition_event){
			.flags = FLAG_TAKEN_BACK,
			.since_ns = g->since_ns,
			.old = STATE_RUNNING,
			.new = STATE_WAITING,
			.left = STATE_WAITING,
			.reason = g->reason,
		});
	}
	return 0;
}

/* From Go 1.26 casgstatus is the slow path of system calls, and reports again what their own probes have reported. */
static __always_inline int enter_syscall(struct goroutine *g)
{
	return g->state != STATE_SYSCALL;
}

static __always_inline int leave_syscall(struct goroutine *g)
{
	return g->state == STATE_SYSCALL || g->state == STATE_UNSEEN;
}

/* Back from a system call, and no P is free. The goroutine was running before if the call was not seen (no probes on
 * system calls), or if its end has been: from Go 1.26 exitsyscall moves to running first. */
static __always_inline int return_without_p(struct goroutine *g, struct move *move)
{
	move->from = g->state == STATE_RUNNING ? STATE_RUNNING : STATE_SYSCALL;
	move->cause = CAUSE_SYSCALL;
	return 1;
}

/* The states that the move goes from and to, as the probed place alone tells them, and the goroutine. */
static __always_inline int states_of_move(struct pt_regs *ctx, __u32 kind, struct move *move, __u64 *gp)
{
	*gp = GO_ARG0(ctx);
	switch (kind) {
	case KIND_CASGSTATUS:
		move->from = GO_ARG1(ctx) & 0xf;
		move->to = GO_ARG2(ctx) & 0xf;
		if (move->from == STATE_DEADEXTRA)
			move->from = STATE_DEAD;
		if (move->to == STATE_DEADEXTRA)
			move->to = STATE_DEAD;
		return 1;
	case KIND_PARK:
		*move = (struct move){ .from = STATE_RUNNING, .to = STATE_WAITING };
		return 1;
	case KIND_READY:
		*move = (struct move){ .from = STATE_WAITING, .to = STATE_RUNNABLE };
		return 1;
	case KIND_RUN:
		*move = (struct move){ .from = STATE_RUNNABLE, .to = STATE_RUNNING };
		return 1;
	case KIND_CREATE:
		*gp = GO_ARG1(ctx);
		/* fall through */
	case KIND_CREATED:
		*move = (struct move){ .from = STATE_DEAD, .to = STATE_RUNNABLE };
		return 1;
	case KIND_YIELD:
		*move = (struct move){ .from = STATE_RUNNING, .to = STATE_RUNNABLE };
		return 1;
	case KIND_STOP:
		*move = (struct move){ .from = STATE_RUNNING, .to = STATE_PREEMPTED };
		return 1;
	case KIND_EXIT:
		*move = (struct move){ .from = STATE_RUNNING, .to = STATE_DEAD };
		return 1;
	case KIND_SYSCALL:
		*gp = GO_CURRENT_G(ctx);
		*move = (struct move){ .from = STATE_RUNNING, .to = STATE_SYSCALL };
		return 1;
	case KIND_SYSCALL_EXIT:
		*gp = GO_CURRENT_G(ctx);
		*move = (struct move){ .from = STATE_SYSCALL, .to = STATE_RUNNING };
		return 1;
	case KIND_SYSCALL_EXIT_NO_P:
		*move = (struct move){ .from = STATE_SYSCALL, .to = STATE_RUNNABLE };
		return 1;
	}
	return 0;
}

/* A coroutine switch reported again by casgstatus, because its direct CAS failed. */
static __always_inline int is_switch_again(struct goroutine *g, __u32 from, __u32 to)
{
	if (g->switched == SWITCH_OUT)
		return from == STATE_RUNNING && to == STATE_WAITING;
	if (g->switched == SWITCH_IN && from != STATE_RUNNING && (to == STATE_RUNNABLE || to == STATE_RUNNING)) {
		if (to == STATE_RUNNING)
			g->switched = SWITCH_NONE;
		return 1;
	}
	return 0;
}

/* The whole of the move whose states are known. */
static __always_inline int understand(struct hit *hit, __u64 gp, struct goroutine *g, struct move *move)
{
	__u32 from = move->from, to = move->to;

	if (hit->kind == KIND_CASGSTATUS && is_switch_again(g, from, to))
		return 0;
	if (to == STATE_RUNNABLE) {
		if (from == STATE_WAITING)
			return wake(hit, gp, g, move);
		/* casgstatus alone doesn't tell whether it is back from a system call. */
		if (from == STATE_RUNNING &&
		    !(hit->kind == KIND_CASGSTATUS && read_word(hit, gp, hit->target->g_syscallsp)))
			return give_up_processor(hit, gp, move);
		if (from == STATE_DEAD) {
			move->cause = CAUSE_NEW;
			return 1;
		}
		return return_without_p(g, move);
	}
	if (from == STATE_RUNNING && to == STATE_WAITING)
		return park(hit, gp, move);
	if (from == STATE_WAITING && to == STATE_RUNNING)
		return resume_on_system_stack(hit, gp, g);
	if (from == STATE_RUNNING && to == STATE_SYSCALL)
		return enter_syscall(g);
	if (from == STATE_SYSCALL && to == STATE_RUNNING)
		return leave_syscall(g);
	if (to == STATE_WAITING) /* a coroutine is born waiting */
		move->reason = read_reason(hit, gp);
	return 1;
}

#endif

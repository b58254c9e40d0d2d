/* SPDX-License-Identifier: GPL-2.0
 *
 * The state machine of a goroutine. Every probe ends in move(): this goroutine goes from one state to another, now.
 *
 * A state is left at a probe, so that the interval that ends there is known: it goes into a histogram (runnable,
 * waiting) or into a sum (the rest). Only consistent intervals are recorded; the others are counted by reason.
 */
#ifndef SCHEDTRACE_GOROUTINE_H
#define SCHEDTRACE_GOROUTINE_H

#include "events.h"
#include "hit.h"
#include "maps.h"
#include "user_memory.h"

/* Not one of Go's states: this goroutine has not been seen before. */
#define STATE_UNSEEN 0xff

/* A coroutine switch is seen at coroswitch_m; if its direct CAS fails, casgstatus reports the same move again. */
enum coroutine_switch {
	SWITCH_NONE = 0,
	SWITCH_OUT = 1,
	SWITCH_IN = 2,
};

/* Why the current interval belongs in no histogram: its beginning is not known. */
enum partial {
	PARTIAL_NOT = 0,
	PARTIAL_BEGAN_BEFORE = 1,
	PARTIAL_INCONSISTENT = 2,
};

static __always_inline struct target_stats *stats_of(__u32 slot)
{
	return (struct target_stats *)stats.lookup(&slot);
}

/* Has the target had the hits it may have? Then the window ends with this one, for all that share its probes. The probes
 * are still there then, and user space is told to take them out: what a program returns does not (see docs/internals.md). */
static __always_inline void spend(struct hit *hit, struct window *window)
{
	struct target *target = hit->target;
	struct window_end end = { .window = target->window };

	add(&target->hits, HITS_BATCH);
	if (target->hits < target->hits_limit || hit->now_ns >= window->until_ns)
		return;
	window->until_ns = hit->now_ns;
	window_ends.ringbuf_output(&end, sizeof(end), 0);
}

/* Also finds out what is probed there. False if the window has ended. */
static __always_inline int count_hit(struct hit *hit, __u64 address)
{
	struct window *window = windows.lookup(&hit->target->window);
	__u32 i;

	if (!window)
		return 0;

	for (i = 0; i < SITE_LIMIT - 1; i++)
		if (hit->target->sites[i] == address || !hit->target->sites[i])
			break;
	if (i < SITE_LIMIT - 1 && !hit->target->sites[i])
		i = SITE_LIMIT - 1;
	i &= SITE_LIMIT - 1;
	add(&hit->stats->hits[i], 1);
	hit->kind = hit->target->kinds[i];
	if (!(hit->stats->hits[i] % HITS_BATCH))
		spend(hit, window);
	return hit->now_ns < window->until_ns;
}

/* False if the process is not a target, or no longer. `address`: where the probe was hit. */
static __always_inline int begin(struct hit *hit, __u64 address)
{
	__u64 pid_tgid = bpf_get_current_pid_tgid();
	__u32 tgid = pid_tgid >> 32;
	struct target *target = targets.lookup(&tgid);
	struct target_stats *s;
	__u64 cgroup_id;

	if (!target) {
		__u32 zero = 0;
		__u64 *foreign = foreign_hits.lookup(&zero);

		if (foreign)
			add(foreign, 1);
		return 0;
	}
	s = stats_of(target->slot);
	if (!s)
		return 0;
	hit->target = target;
	hit->stats = s;
	hit->events_lost = lost_events();
	if (RECORDING && !hit->events_lost)
		return 0;
	hit->now_ns = bpf_ktime_get_ns();
	hit->tgid = tgid;
	hit->tid = (__u32)pid_tgid;
	hit->flags = 0;
	if (!count_hit(hit, address))
		return 0;
	cgroup_id = bpf_get_current_cgroup_id();
	if (s->cgroup_id != cgroup_id) {
		s->cgroup_id = cgroup_id;
		send_cgroup(hit, cgroup_id);
	}
	return 1;
}

/* Hits are dearer where the target's own work leaves the caches cold: it shows in how long programs take. The time, stirred,
 * is the die: clocks may count in steps of some tens of ns. */
static __always_inline void end(struct hit *hit)
{
	__u64 ns;

	if (hit->now_ns * 0x9E3779B97F4A7C15ULL >> (hit->target->timed_often ? TIMED_OFTEN_SHIFT : TIMED_SHIFT))
		return;
	ns = bpf_ktime_get_ns() - hit->now_ns;
	if (ns < TIMED_MOST_NS) {
		add(&hit->stats->timed_ns, ns);
		add(&hit->stats->timed, 1);
	}
}

static __always_inline __u64 read_word(struct hit *hit, __u64 gp, __u16 offset)
{
	__u64 value = 0;

	if (offset == OFFSET_UNKNOWN)
		return 0;
	if (read_user(&value, sizeof(value), (void *)(gp + offset)))
		lost(hit->stats, LOST_UNREADABLE);
	return value;
}

static __always_inline __u8 read_byte(struct hit *hit, __u64 gp, __u16 offset, __u8 unknown)
{
	__u8 value = unknown;

	if (offset == OFFSET_UNKNOWN)
		return unknown;
	if (read_user(&value, sizeof(value), (void *)(gp + offset))) {
		lost(hit->stats, LOST_UNREADABLE);
		return unknown;
	}
	return value;
}

static __always_inline __u8 read_reason(struct hit *hit, __u64 gp)
{
	__u8 reason = read_byte(hit, gp, hit->target->g_waitreason, REASON_UNKNOWN);

	return reason < REASON_COUNT ? reason : REASON_UNKNOWN;
}

/* The goroutine's record, made at first sight; 0 if the map is full. */
static __always_inline struct goroutine *follow(struct hit *hit, __u64 gp)
{
	struct goroutine_key key = { .g = gp, .tgid = hit->tgid };
	struct goroutine *g = goroutines.lookup(&key);

	if (g)
		return g;
	struct goroutine fresh = {
		.since_ns = hit->target->attached_ns ?: hit->now_ns,
		.state = STATE_UNSEEN,
		.reason = REASON_UNKNOWN,
		.partial = PARTIAL_BEGAN_BEFORE,
	};
	fresh.start_pc = read_word(hit, gp, hit->target->g_startpc);
	goroutines.update(&key, &fresh);
	g = goroutines.lookup(&key);
	if (!g)
		lost(hit->stats, LOST_GOROUTINES_FULL);
	else
		send_goroutine(hit, gp, g->start_pc, 0, FLAG_FIRST);
	return g;
}

/* The goroutine is gone: its totals go to its start function, and its runtime.g is free to be used again. */
static __always_inline void forget(struct hit *hit, struct goroutine *g, __u64 gp)
{
	struct function_key function = { .start_pc = g->start_pc, .slot = hit->target->slot };
	struct goroutine_key key = { .g = gp, .tgid = hit->tgid };
	struct totals *sum = functions.lookup(&function);

	if (!sum) {
		struct totals none = {};

		functions.insert(&function, &none);
		sum = functions.lookup(&function);
	}
	if (sum) {
		struct totals *t = &g->totals;
		__u64 *into = (__u64 *)sum, *from = (__u64 *)t;

		/* all fields but the maxima, which are the last two */
		for (int i = 0; i < sizeof(struct totals) / sizeof(__u64) - 2; i++)
			add(&into[i], from[i]);
		if (t->max_runnable_ns > sum->max_runnable_ns)
			sum->max_runnable_ns = t->max_runnable_ns;
		if (t->max_waiting_ns > sum->max_waiting_ns)
			sum->max_waiting_ns = t->max_waiting_ns;
	} else {
		lost(hit->stats, LOST_FUNCTIONS_FULL);
	}
	goroutines.delete(&key);
}

static __always_inline void count(struct target_stats *s, __u32 from, __u32 to)
{
	__u32 i = from * STATE_COUNT + to;

	if (i < STATE_COUNT * STATE_COUNT)
		add(&s->transitions[i], 1);
}

/* Close the interval in g->state. `whole`: the move that ends it is the one that such an interval should end with. */
static __always_inline void leave(struct hit *hit, struct goroutine *g, __u32 state, int whole)
{
	struct target_stats *s = hit->stats;
	__u64 ns = hit->now_ns > g->since_ns ? hit->now_ns - g->since_ns : 0;

	if (state == STATE_RUNNABLE) {
		g->totals.runnable_ns += ns;
		if (whole) {
			__u32 cause = g->cause;

			if (cause < CAUSE_COUNT)
				record(&s->sched_latency[cause], ns);
			if (ns > g->totals.max_runnable_ns)
				g->totals.max_runnable_ns = ns;
		} else {
			add(&s->partial_ns[STATE_RUNNABLE], ns);
			if (g->partial == PARTIAL_BEGAN_BEFORE)
				lost(s, LOST_BEGAN_BEFORE);
		}
	} else if (state == STATE_WAITING) {
		__u32 reason = g->reason & (REASON_COUNT - 1);

		g->totals.waiting_ns += ns;
		if (whole) {
			record(&s->wait[reason], ns);
			if (ns > g->totals.max_waiting_ns)
				g->totals.max_waiting_ns = ns;
		} else {
			add(&s->partial_wait_ns[reason], ns);
			add(&s->partial_waits[reason], 1);
			if (g->partial == PARTIAL_BEGAN_BEFORE)
				lost(s, LOST_BEGAN_BEFORE);
		}
	} else if (state < STATE_COUNT && g->partial != PARTIAL_BEGAN_BEFORE) {
		/* else: running, or in a system call that was not seen to begin: nobody knows which of them, and since when */
		add(&s->partial_ns[state], ns);
		if (state == STATE_RUNNING)
			g->totals.running_ns += ns;
		else if (state == STATE_SYSCALL)
			g->totals.syscall_ns += ns;
	}
}

/* `from` as the probe knows it. The last state seen may differ for reasons that are known (below) or not. Returns the
 * state whose interval ends. */
static __always_inline __u32 reconcile(struct hit *hit, struct goroutine *g, __u32 from)
{
	__u32 seen = g->state;

	if (seen == from)
		return from;
	if (seen == STATE_UNSEEN)
		return from;
	/* preemptPark does not call casgstatus: where it has no probe, the goroutine seems to run until it is woken. */
	if (seen == STATE_RUNNING && from == STATE_PREEMPTED)
		return seen;
	/* From Go 1.26 system calls are entered and left by a direct CAS; casgstatus is only its slow path. */
	if ((seen == STATE_RUNNING && from == STATE_SYSCALL) || (seen == STATE_SYSCALL && from == STATE_RUNNING))
		return seen;
	/* A g that was freed where no probe sits is used again. */
	if (from == STATE_DEAD)
		return from;
	lost(hit->stats, LOST_INCONSISTENT);
	g->partial = PARTIAL_INCONSISTENT;
	return from;
}

/* A move: from one state to another, with the cause if it becomes runnable and the reason if it waits. */
struct move {
	__u32 from;
	__u32 to;
	__u8 cause;
	__u8 reason;
};

/* Make the move. Inlined: callers decide first and call it once, since its code is the bulk of every program. */
static __always_inline void make(struct hit *hit, __u64 gp, struct goroutine *g, struct move move)
{
	struct target_stats *s = hit->stats;
	__u32 from = move.from, to = move.to, left;

	if (from == STATE_DEAD) {
		g->partial = PARTIAL_NOT;
		g->since_ns = hit->now_ns;
		if (g->state != STATE_UNSEEN && g->state != STATE_DEAD) {
			/* its death was not seen: nothing of its last life belongs to the new one */
			struct totals none = {};

			g->totals = none;
			g->start_pc = read_word(hit, gp, hit->target->g_startpc);
			g->named = 0;
			send_goroutine(hit, gp, g->start_pc, 0, FLAG_FIRST);
		}
		if (to != STATE_SYSCALL) /* a C thread that calls into Go borrows a g, straight into a system call */
			g->totals.goroutines++;
	}
	/* newproc1 gives it an id after it has made it runnable; and what is woken will run, so that on_ready_list, which the
	 * verifier can hardly walk through, does without. */
	if (RECORDING && from != STATE_DEAD && to != STATE_RUNNABLE && !g->named) {
		g->named = 1;
		send_goroutine(hit, gp, g->start_pc, read_word(hit, gp, hit->target->g_goid), 0);
	}
	left = reconcile(hit, g, from);
	count(s, from, to);
	send_transition(hit, gp, (struct transition_event){
		.flags = g->partial,
		.since_ns = g->since_ns,
		.old = from,
		.new = to,
		.left = left,
		.cause = to == STATE_RUNNABLE ? move.cause : g->cause,
		.reason = to == STATE_WAITING ? move.reason : g->reason,
	});
	leave(hit, g, left, !g->partial && (left != STATE_RUNNABLE || to == STATE_RUNNING));

	if (to == STATE_RUNNING) {
		if (from == STATE_RUNNABLE)
			g->totals.runs++;
		else if (from == STATE_WAITING)
			g->totals.switches++;
		else if (from == STATE_SYSCALL)
			g->totals.syscalls++;
	} else if (to == STATE_RUNNABLE) {
		if (from == STATE_WAITING)
			g->totals.readies++;
		else if (move.cause == CAUSE_PREEMPTED)
			g->totals.preempted++;
		else if (move.cause == CAUSE_YIELDED)
			g->totals.yielded++;
		else if (from == STATE_SYSCALL)
			g->totals.syscalls++;
		g->cause = move.cause;
	} else if (to == STATE_WAITING) {
		if (from == STATE_RUNNING)
			g->totals.parks++;
		g->reason = move.reason;
	}
	g->state = to;
	g->since_ns = hit->now_ns;
	g->partial = PARTIAL_NOT;
	g->switched = SWITCH_NONE;
	if (to == STATE_DEAD) {
		g->totals.exits++;
		forget(hit, g, gp);
	}
}

#endif

/* SPDX-License-Identifier: GPL-2.0
 *
 * The programs. plan.py decides which functions of the Go runtime are probed, so that each change of state is reported
 * exactly once. Most run on g0, so the goroutine is an argument. No kernel header is needed: only pt_regs, tracepoint
 * arguments and user memory are read.
 */
#include <uapi/linux/ptrace.h>
#include "types.h"
#include "maps.h"
#include "goroutine.h"
#include "moves.h"
#include "thread.h"
#include "wait_parts.h"
#include "world.h"
#ifdef WITH_ON_RECORD
#include "record.h"
#endif

/* A goroutine that was runnable begins to run on this thread: what its wait, which make() is to record, was for. */
static __always_inline void divide_wait(struct hit *hit, __u64 gp, struct goroutine *g)
{
	struct wait unknown = {};
	struct wait_parts parts;

	if (g->state != STATE_RUNNABLE || g->partial || hit->now_ns <= g->since_ns)
		return;
	parts = divide(g->since_ns, hit->now_ns, unknown);
	if (parts.kernel_ns)
		add(&hit->stats->kernel_ns, parts.kernel_ns);
	if (parts.undivided_ns)
		add(&hit->stats->undivided_ns, parts.undivided_ns);
	if (parts.kernel_ns || parts.undivided_ns)
		send_wait(hit, gp, parts.kernel_ns, parts.undivided_ns);
}

static __always_inline void probe(struct pt_regs *ctx, struct hit *hit)
{
	struct move move = {};
	struct goroutine *g;
	__u64 gp;

	if (!states_of_move(ctx, hit->kind, &move, &gp)) {
		if (!stop_or_start_world(ctx, hit))
			lost(hit->stats, LOST_PROBE_UNKNOWN);
		return;
	}
	/* A new g before its life, a growing stack, a leak report: no change of what the goroutine is doing. */
	if (move.from == STATE_IDLE || move.from == STATE_COPYSTACK || move.to == STATE_COPYSTACK ||
	    move.to == STATE_LEAKED || move.from == move.to) {
		count(hit->stats, move.from, move.to);
		send_uncounted(hit, gp, move.from, move.to);
		return;
	}
	g = follow(hit, gp);
	if (!g) {
		if (hit->kind == KIND_CASGSTATUS) {
			count(hit->stats, move.from, move.to);
			send_uncounted(hit, gp, move.from, move.to);
		}
		return;
	}
	/* The scheduler readies some goroutines itself and runs them at once (the first one netpoll returns, GC workers, a
	 * park whose unlock failed): those are found waiting, and have waited to run for nothing. */
	if (hit->kind == KIND_RUN && (g->state == STATE_WAITING || g->state == STATE_PREEMPTED))
		move = (struct move){ .from = STATE_WAITING, .to = STATE_RUNNABLE };
	if (!understand(hit, gp, g, &move))
		return;
	if (move.from == STATE_RUNNABLE && move.to == STATE_RUNNING)
		divide_wait(hit, gp, g);
#pragma clang loop unroll(disable)
	for (int i = 0; i < 2; i++) {
		make(hit, gp, g, move);
		if (hit->kind != KIND_RUN || move.to == STATE_RUNNING)
			break;
		move = (struct move){ .from = STATE_RUNNABLE, .to = STATE_RUNNING };
	}
}

/* All probes but those of the programs below. One program, since what takes long is to compile make(). */
int on_probe(struct pt_regs *ctx)
{
	struct hit hit;

	if (begin(&hit, PROBED_ADDRESS(ctx))) {
		probe(ctx, &hit);
		end(&hit);
	}
	return 0;
}

/* Its loop takes the kernel's verifier a quarter of a second and few plans have it, so it is compiled when asked for. */
#ifdef WITH_ON_READY_LIST
int on_ready_list(struct pt_regs *ctx)
{
	struct move move = {};
	struct hit hit;
	struct goroutine *g;
	__u64 gp;

	if (!begin(&hit, PROBED_ADDRESS(ctx)))
		return 0;
	gp = read_word(&hit, GO_ARG0(ctx), 0);
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

int on_coroutine_switch(struct pt_regs *ctx)
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

#ifdef WITH_ON_RECORD
static __always_inline void sample(struct pt_regs *ctx, struct hit *hit)
{
	__u64 histogram = GO_ARG0(ctx), ns = GO_ARG1(ctx);
	struct sample_stats *s;
	struct histogram *latency;
	struct sampler *sampler;
	__u64 cause;
	__u32 i;

	sampler = samplers.lookup(&hit->tgid);
	s = (struct sample_stats *)samples.lookup(&hit->target->slot);
	if (!sampler || !s)
		return;
	for (i = 0; i < DURATION_COUNT; i++)
		if (sampler->histograms[i] == histogram)
			break;
	if (i >= DURATION_COUNT) {
		lost(hit->stats, LOST_PROBE_UNKNOWN);
		return;
	}
	if (ns >> 63) { /* a clock that went back: the runtime does not count it among times either */
		lost(hit->stats, LOST_INCONSISTENT);
		return;
	}
	if (i != DURATION_RUN) {
		record(&s->stop_the_world[i], ns);
		stopped(sampler, hit->now_ns, ns, i >= DURATION_STOPPED_GC);
		return;
	}
	if (!ns) {
		add(&s->no_wait, 1);
		return;
	}
	cause = cause_of_sample(hit, sampler, GO_CURRENT_G(ctx));
	/* The number that is compared must be the one that is multiplied, or the verifiers of 5.10 and 6.1 see no bound. */
	asm volatile("" : "+r"(cause));
	if (cause >= CAUSE_COUNT)
		cause = CAUSE_UNKNOWN;
	latency = &s->sched_latency[cause];
	asm volatile("" : "+r"(latency));
	record(latency, ns);
	divide_sample(hit, sampler, s, ns);
}

/* The sampled level's one probe. */
int on_record(struct pt_regs *ctx)
{
	struct hit hit;

	if (begin(&hit, PROBED_ADDRESS(ctx))) {
		sample(ctx, &hit);
		end(&hit);
	}
	return 0;
}
#endif

/* SPDX-License-Identifier: GPL-2.0
 *
 * The sampled level. The runtime takes a sample of how long goroutines are runnable until they run, and hands each to
 * (*timeHistogram).record(h, ns), as it does with how long it stops the world. Which it is, the histogram's address says.
 *
 * A sample comes from casgstatus, called by execute, on g0 of the thread that is about to run the goroutine: that one is
 * m.curg, and its status is changed already. How it had come to stop still shows: gogo, which is still to come, starts it at
 * g.sched.pc. That is its start function, or lies behind a call of mcall, or else behind the check of a stack. What calls
 * of mcall are for is known of all of them.
 *
 * Samples of 0 ns are of what is no wait to run: system calls (up to Go 1.25), a stack that grew, a goroutine that ran
 * on the system stack and was called waiting meanwhile.
 */
#ifndef SCHEDTRACE_RECORD_H
#define SCHEDTRACE_RECORD_H

#include "goabi.h"
#include "goroutine.h"

struct sample_stats_bytes {
	char bytes[sizeof(struct sample_stats)] __attribute__((aligned(8)));
};

BPF_HASH(samplers, __u32, struct sampler, MAX_TARGETS);
BPF_PERCPU_ARRAY(samples, struct sample_stats_bytes, MAX_TARGETS);

/* Behind a call of mcall that is not listed: user code into which the compiler copied Gosched, mostly. */
static __always_inline __u32 unlisted_place(struct hit *hit, struct sampler *sampler, __u64 pc)
{
	__u8 call[CALL_SIZE] = {};

	if (read_user(call, sizeof(call), (void *)(pc - CALL_SIZE))) {
		lost(hit->stats, LOST_UNREADABLE);
		return PLACE_UNKNOWN;
	}
	return IS_CALL(call) && CALLED(call, pc) == sampler->mcall ? sampler->other_place : PLACE_PREEMPT;
}

static __always_inline __u32 place_of(struct hit *hit, struct sampler *sampler, __u64 pc)
{
	for (__u32 i = 0; i < STOP_LIMIT; i++) {
		if (sampler->stops[i] == pc)
			return sampler->places[i];
		if (!sampler->stops[i])
			break;
	}
	return unlisted_place(hit, sampler, pc);
}

/* The goroutine that is about to run on this thread, 0 if it does not show. `g`: the running g. */
static __always_inline __u64 about_to_run(struct hit *hit, struct sampler *sampler, __u64 g)
{
	__u64 m = read_word(hit, g, sampler->g_m);
	__u64 gp = m ? read_word(hit, m, sampler->m_curg) : 0;

	if (!gp || gp == g || (read_word(hit, gp, sampler->g_status) & 0xf) != STATE_RUNNING)
		return 0;
	return gp;
}

static __always_inline __u32 cause_of_sample(struct hit *hit, struct sampler *sampler, __u64 g)
{
	__u64 gp = about_to_run(hit, sampler, g), pc;

	if (!gp || !sampler->stops[0])
		return CAUSE_UNKNOWN;
	pc = read_word(hit, gp, sampler->g_pc);
	if (!pc)
		return CAUSE_UNKNOWN;
	if (pc == read_word(hit, gp, hit->target->g_startpc))
		return CAUSE_NEW;
	switch (place_of(hit, sampler, pc)) {
	case PLACE_PARK:
		return hit->target->cause_of_reason[read_reason(hit, gp) & (REASON_COUNT - 1)];
	case PLACE_YIELD: /* as level full has it: see give_up_processor */
		return read_byte(hit, gp, hit->target->g_preempt, 0) ? CAUSE_PREEMPTED : CAUSE_YIELDED;
	case PLACE_SYSCALL:
		return CAUSE_SYSCALL;
	case PLACE_PREEMPT:
		return CAUSE_PREEMPTED;
	}
	return CAUSE_UNKNOWN;
}

/* A goroutine has waited for `ns` to run. Those who run before the one that starts the world has told so find it stopped. */
static __always_inline void divide_sample(struct hit *hit, struct sampler *sampler, struct sample_stats *s, __u64 ns)
{
	struct wait_parts parts = divide(hit->now_ns - ns, hit->now_ns, sampler->stopped);

	if (parts.kernel_ns)
		add(&s->kernel_ns, parts.kernel_ns);
	if (parts.stopped_ns)
		add(&s->stopped_ns, parts.stopped_ns);
	if (parts.undivided_ns)
		add(&s->undivided_ns, parts.undivided_ns);
}

/* The world has been stopped for `ns`, and whether all run again. */
static __always_inline void stopped(struct sampler *sampler, __u64 now_ns, __u64 ns, int again)
{
	sampler->stopped.begin_ns = now_ns - ns;
	sampler->stopped.end_ns = again ? now_ns : NO_LIMIT;
}

#endif

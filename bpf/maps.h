/* SPDX-License-Identifier: GPL-2.0
 *
 * The maps. Sizes are given by session.py (-D): MAX_TARGETS, MAX_GOROUTINES, MAX_FUNCTIONS, MAX_THREADS.
 * There may be as many processes whose threads are watched as targets.
 */
#ifndef SCHEDTRACE_MAPS_H
#define SCHEDTRACE_MAPS_H

#include "types.h"

/* The statistics to BCC: it would make printing code for each of 2,300 numbers, a fifth of the time to compile. */
struct target_stats_bytes {
	char bytes[sizeof(struct target_stats)] __attribute__((aligned(8)));
};
struct thread_stats_bytes {
	char bytes[sizeof(struct thread_stats)] __attribute__((aligned(8)));
};

BPF_HASH(targets, __u32, struct target, MAX_TARGETS);
BPF_HASH(goroutines, struct goroutine_key, struct goroutine, MAX_GOROUTINES);
BPF_HASH(functions, struct function_key, struct totals, MAX_FUNCTIONS);
BPF_PERCPU_ARRAY(stats, struct target_stats_bytes, MAX_TARGETS);
BPF_HASH(process_slots, __u32, struct process_slot, MAX_TARGETS);
BPF_ARRAY(processes, struct process, MAX_TARGETS);
BPF_HASH(threads, __u32, struct thread, MAX_THREADS);
BPF_PERCPU_ARRAY(thread_stats, struct thread_stats_bytes, MAX_TARGETS);
BPF_HASH(off_cpu_functions, struct function_key, struct off_cpu_totals, MAX_FUNCTIONS);
BPF_ARRAY(windows, struct window, MAX_TARGETS + 1);
BPF_RINGBUF_OUTPUT(window_ends, 1);
/* Probes sit on an executable, not on a process: hits by processes nobody asked about are paid for all the same. */
BPF_PERCPU_ARRAY(foreign_hits, __u64, 1);

#ifdef RECORDING_PAGES
BPF_RINGBUF_OUTPUT(events, RECORDING_PAGES);
/* Events that found no room in it. Those that did are counted by its size: all are equally long. */
BPF_PERCPU_ARRAY(events_lost, __u64, 1);
#endif

#ifdef WITH_PROCESS_EVENTS
BPF_PERF_OUTPUT(process_events);
#endif

/* A uprobe's program can be preempted by another thread that hits a probe on the same CPU, so even per-CPU counters
 * are added to atomically: a count that is nearly right is wrong. */
static __always_inline void add(__u64 *counter, __u64 value)
{
	__sync_fetch_and_add(counter, value);
}

static __always_inline void lost(struct target_stats *s, __u32 reason)
{
	if (reason < LOST_COUNT)
		add(&s->lost[reason], 1);
}

/* 1 if a > b, for numbers below 2^63. A value and no branch: asm hides it from the compiler, which would make one. */
static __always_inline __u64 above(__u64 a, __u64 b)
{
	__u64 difference = b - a;

	asm volatile("" : "+r"(difference));
	return difference >> 63;
}

/* Slot of a duration: the smallest k with ns <= 1000 << k. No division: with l = floor(log2(ns)),
 * 1000 << (l - 9) lies in (2^l, 2^(l+1)), so that k is l - 9 or l - 8. The search has no branches:
 * the verifier would follow each on its own, 64 paths in every turn of on_ready_list's loop, and give up on Linux 6.1. */
static __always_inline __u32 histogram_slot(__u64 ns)
{
	__u64 v = ns, l = 0, step;

	step = above(v >> 1, 0x7fffffff) << 5; v >>= step; l += step;
	step = above(v, 0xffff) << 4; v >>= step; l += step;
	step = above(v, 0xff) << 3; v >>= step; l += step;
	step = above(v, 0xf) << 2; v >>= step; l += step;
	step = above(v, 0x3) << 1; v >>= step; l += step;
	l += above(v, 1);
	if (l < 9)
		return 0;
	l -= 9;
	if (l >= HISTOGRAM_SLOTS - 1)
		return HISTOGRAM_SLOTS - 1;
	return l + above(ns, (__u64)HISTOGRAM_UNIT_NS << l);
}

static __always_inline void record(struct histogram *h, __u64 ns)
{
	__u32 slot = histogram_slot(ns);

	if (slot >= HISTOGRAM_SLOTS)
		return; /* cannot be; the verifier wants to see it */
	add(&h->slots[slot], 1);
	add(&h->sum_ns, ns);
	/* A lost race here loses a maximum only if two are recorded on one CPU in the same nanoseconds. */
	if (ns > h->max_ns)
		h->max_ns = ns;
}

#endif

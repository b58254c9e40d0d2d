/* SPDX-License-Identifier: GPL-2.0
 *
 * What is sent for a recording. Without one, nothing of it is compiled.
 *
 * One ring buffer for all CPUs keeps events in the order in which they happened. It never wakes its reader, who comes often
 * enough by itself: a wake-up costs the target more than all else here.
 */
#ifndef SCHEDTRACE_EVENTS_H
#define SCHEDTRACE_EVENTS_H

#include "hit.h"
#include "maps.h"

#ifdef RECORDING_PAGES
#define RECORDING 1
#else
#define RECORDING 0
#endif

/* Where events are counted that find no room; 0 without a recording. */
static __always_inline __u64 *lost_events(void)
{
#ifdef RECORDING_PAGES
	__u32 zero = 0;

	return events_lost.lookup(&zero);
#else
	return 0;
#endif
}

/* No branch: on_ready_list's loop has so many that the verifier just gets through. */
static __always_inline void send(void *event, __u64 *events_lost_count)
{
#ifdef RECORDING_PAGES
	__s64 failed = events.ringbuf_output(event, sizeof(struct transition_event), BPF_RB_NO_WAKEUP);

	add(events_lost_count, (__u64)failed >> 63);
#endif
}

/* All but what is the same for all transitions of a hit is in `event`. */
static __always_inline void send_transition(struct hit *hit, __u64 gp, struct transition_event event)
{
	if (!RECORDING)
		return;
	event.time_ns = hit->now_ns;
	event.type = EVENT_TRANSITION;
	event.slot = hit->target->slot;
	event.tid = hit->tid;
	event.g = gp;
	event.cpu = bpf_get_smp_processor_id();
	send(&event, hit->events_lost);
}

/* A transition that says nothing of what the goroutine does, or of one that is not followed. */
static __always_inline void send_uncounted(struct hit *hit, __u64 gp, __u32 old, __u32 new)
{
	struct transition_event event = { .flags = FLAG_NO_INTERVAL, .since_ns = hit->now_ns };

	event.old = event.left = old;
	event.new = new;
	send_transition(hit, gp, event);
}

static __always_inline void send_goroutine(struct hit *hit, __u64 gp, __u64 start_pc, __u64 goid, __u8 flags)
{
	struct goroutine_event event = {
		.time_ns = hit->now_ns,
		.type = EVENT_GOROUTINE,
		.flags = flags,
		.slot = hit->target->slot,
		.tid = hit->tid,
		.g = gp,
		.start_pc = start_pc,
		.goid = goid,
	};

	if (RECORDING)
		send(&event, hit->events_lost);
}

static __always_inline void send_cgroup(struct hit *hit, __u64 cgroup_id)
{
	struct cgroup_event event = {
		.time_ns = hit->now_ns,
		.type = EVENT_CGROUP,
		.slot = hit->target->slot,
		.tid = hit->tid,
		.cgroup_id = cgroup_id,
	};

	if (!RECORDING)
		return;
	event.cpu = bpf_get_smp_processor_id();
	send(&event, hit->events_lost);
}

static __always_inline void send_switch(struct thread *t, __u64 now_ns, struct switch_event event)
{
	__u64 *count = lost_events();

	if (!count)
		return;
	event.time_ns = now_ns;
	event.slot = t->slot;
	event.cpu = bpf_get_smp_processor_id();
	send(&event, count);
}

#endif

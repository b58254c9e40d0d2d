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
	event.flags |= hit->flags;
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

/* What is to be known of the wait that ends with the transition to come: the part in which the thread was runnable and not
 * running, and that of which nothing is known. */
static __always_inline void send_wait(struct hit *hit, __u64 gp, __u64 kernel_ns, __u64 undivided_ns)
{
	struct wait_event event = {
		.time_ns = hit->now_ns,
		.type = EVENT_WAIT,
		.slot = hit->target->slot,
		.tid = hit->tid,
		.g = gp,
		.kernel_ns = kernel_ns,
		.undivided_ns = undivided_ns,
	};

	if (!RECORDING)
		return;
	hit->flags = FLAG_DIVIDED;
	send(&event, hit->events_lost);
}

/* The process whose thread that is, if it is recorded. */
static __always_inline struct process *recorded_process(struct thread *t)
{
	struct process *process;

	if (!RECORDING)
		return 0;
	process = processes.lookup(&t->slot);
	return process && process->is_recorded ? process : 0;
}

static __always_inline void send_switch(struct thread *t, __u64 now_ns, struct switch_event event)
{
	struct process *process = recorded_process(t);
	__u64 *count = lost_events();

	if (!process || !count)
		return;
	event.time_ns = now_ns;
	event.slot = process->event_slot;
	event.cpu = bpf_get_smp_processor_id();
	send(&event, count);
}

/* The thread is on a CPU again, and its goroutine runs. */
static __always_inline void send_off_cpu(__u32 tid, struct thread *t, __u64 now_ns)
{
	struct process *process = recorded_process(t);
	__u64 *count = lost_events();
	struct off_cpu_event event = {
		.time_ns = now_ns,
		.type = EVENT_OFF_CPU,
		.flags = t->off_cpu == OFF_CPU_BLOCKED ? FLAG_BLOCKED : 0,
		.tid = tid,
		.off_since_ns = t->off_since_ns,
		.runnable_since_ns = t->runnable_since_ns,
		.start_pc = t->start_pc,
	};

	if (!process || !count)
		return;
	event.slot = process->event_slot;
	send(&event, count);
}

#endif

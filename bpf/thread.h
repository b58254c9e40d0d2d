/* SPDX-License-Identifier: GPL-2.0
 *
 * The kernel's side: how long threads of targets are runnable and not running. They are in `threads` when user space
 * lists them at attach, or when they are created later (task_newtask tells a thread from a process).
 *
 * A wait begins where the kernel's own run_delay does: at the wake-up, or when a thread that still wants to run is
 * switched out; it ends when the thread is switched in. Not every switch or wake-up is reported: the kernel leaves out a
 * tracepoint's programs on a CPU where another BPF program or a bpf() call was interrupted (bpf_prog_active), and some
 * kernels hide switches away from certain tasks. That shows at the thread's next event, and the wait is counted as lost.
 */
#ifndef SCHEDTRACE_THREAD_H
#define SCHEDTRACE_THREAD_H

#include "events.h"
#include "maps.h"

#define CLONE_THREAD 0x00010000ULL
/* sched_switch's prev_state: the task's state bits; TASK_REPORT_MAX (0x100) stands for "preempted". None of the lower
 * bits means that the task is still runnable. */
#define PREV_STATE_MASK 0xffLL

enum on_cpu {
	THREAD_UNKNOWN = 0,
	THREAD_OFF = 1,
	THREAD_ON = 2,
};

static __always_inline void woken(__u32 tid)
{
	struct thread *t = threads.lookup(&tid);

	/* A wake-up of a thread that has not left the CPU yet puts it on no run queue. */
	if (t && t->on_cpu != THREAD_ON && !t->runnable_since_ns)
		t->runnable_since_ns = bpf_ktime_get_ns();
}

TRACEPOINT_PROBE(sched, sched_wakeup)
{
	woken(args->pid);
	return 0;
}

TRACEPOINT_PROBE(sched, sched_wakeup_new)
{
	woken(args->pid);
	return 0;
}

static __always_inline void lost_wait(struct thread *t, __u32 reason)
{
	struct target_stats *s = stats_of(t->slot);

	if (s)
		lost(s, reason);
}

TRACEPOINT_PROBE(sched, sched_switch)
{
	__u32 prev = args->prev_pid, next = args->next_pid;
	struct thread *t = threads.lookup(&prev);
	__u64 now = bpf_ktime_get_ns();

	if (t) {
		if (t->on_cpu == THREAD_OFF && t->runnable_since_ns)
			lost_wait(t, LOST_SWITCH_UNSEEN); /* it waited, and its switch in was not seen */
		send_switch(t, now, (struct switch_event){
			.type = EVENT_THREAD_OFF,
			.flags = t->on_cpu == THREAD_OFF && t->runnable_since_ns ? FLAG_UNSEEN : 0,
			.tid = prev,
			.other_tid = next,
			.prev_state = args->prev_state,
		});
		t->on_cpu = THREAD_OFF;
		t->runnable_since_ns = (args->prev_state & PREV_STATE_MASK) ? 0 : now;
	}
	t = threads.lookup(&next);
	if (t) {
		struct target_stats *s = stats_of(t->slot);

		if (!t->runnable_since_ns)
			lost_wait(t, t->on_cpu == THREAD_UNKNOWN ? LOST_BEGAN_BEFORE : LOST_SWITCH_UNSEEN);
		else if (s && now >= t->runnable_since_ns)
			record(&s->run_queue, now - t->runnable_since_ns);
		send_switch(t, now, (struct switch_event){
			.type = EVENT_THREAD_ON,
			.flags = t->runnable_since_ns ? 0 : t->on_cpu == THREAD_UNKNOWN ? FLAG_BEGAN_BEFORE : FLAG_UNSEEN,
			.tid = next,
			.since_ns = t->runnable_since_ns,
			.other_tid = prev,
		});
		t->on_cpu = THREAD_ON;
		t->runnable_since_ns = 0;
	}
	return 0;
}

TRACEPOINT_PROBE(task, task_newtask)
{
	__u32 tgid = bpf_get_current_pid_tgid() >> 32, tid = args->pid;
	struct target *target;
	struct target_stats *s;

	if (!(args->clone_flags & CLONE_THREAD))
		return 0;
	target = targets.lookup(&tgid);
	if (!target)
		return 0;
	struct thread fresh = { .slot = target->slot, .on_cpu = THREAD_OFF };

	if (threads.update(&tid, &fresh)) {
		s = stats_of(target->slot);
		if (s)
			lost(s, LOST_THREADS_FULL);
	}
	return 0;
}

TRACEPOINT_PROBE(sched, sched_process_exit)
{
	__u32 tid = args->pid;

	threads.delete(&tid);
	return 0;
}

/* After execve the process is another program: what it does is not recorded, and user space is told. Of its threads
 * only one is left. */
static __always_inline void another_program(__u32 tgid)
{
	if (!targets.lookup(&tgid))
		return;
	targets.delete(&tgid);
	threads.delete(&tgid);
}

TRACEPOINT_PROBE(sched, sched_process_exec)
{
	__u32 tgid = bpf_get_current_pid_tgid() >> 32;

	another_program(tgid);
#ifdef WITH_PROCESS_EVENTS
	struct process_event event = { .tgid = tgid };

	process_events.perf_submit(args, &event, sizeof(event));
#endif
	return 0;
}

#endif

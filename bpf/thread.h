/* SPDX-License-Identifier: GPL-2.0
 *
 * The kernel's side: how long threads of targets are runnable and not running. They are in `threads` when user space
 * lists them at attach, or when they are created later (task_newtask tells a thread from a process).
 *
 * A wait begins where the kernel's own run_delay does: at the wake-up, or when a thread that still wants to run is
 * switched out; it ends when the thread is switched in.
 */
#ifndef SCHEDTRACE_THREAD_H
#define SCHEDTRACE_THREAD_H

#include "maps.h"

#define CLONE_THREAD 0x00010000ULL
/* sched_switch's prev_state: the task's state bits; TASK_REPORT_MAX (0x100) stands for "preempted". None of the lower
 * bits means that the task is still runnable. */
#define PREV_STATE_MASK 0xffLL

static __always_inline void woken(__u32 tid)
{
	struct thread *t = threads.lookup(&tid);

	/* A wake-up of a thread that has not left the CPU yet puts it on no run queue. */
	if (t && !t->on_cpu && !t->runnable_since_ns)
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

TRACEPOINT_PROBE(sched, sched_switch)
{
	__u32 prev = args->prev_pid, next = args->next_pid;
	struct thread *t = threads.lookup(&prev);
	__u64 now = bpf_ktime_get_ns();

	if (t) {
		t->on_cpu = 0;
		t->runnable_since_ns = (args->prev_state & PREV_STATE_MASK) ? 0 : now;
	}
	t = threads.lookup(&next);
	if (t) {
		__u32 slot = t->slot;
		struct target_stats *s = stats.lookup(&slot);

		t->on_cpu = 1;
		if (s && t->runnable_since_ns && now >= t->runnable_since_ns)
			record(&s->run_queue, now - t->runnable_since_ns);
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
	struct thread fresh = { .slot = target->slot };

	if (threads.update(&tid, &fresh)) {
		__u32 slot = target->slot;

		s = stats.lookup(&slot);
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
	struct target *target = targets.lookup(&tgid);
	struct target_stats *s;

	if (!target)
		return;
	__u32 slot = target->slot;
	s = stats.lookup(&slot);
	if (s)
		add(&s->executions, 1);
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

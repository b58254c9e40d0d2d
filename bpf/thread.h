/* SPDX-License-Identifier: GPL-2.0
 *
 * The kernel's side: how long threads of Go processes are runnable and not running, and how long a goroutine that runs
 * for Go is off the CPU because its thread is. No probe is needed, so it is counted all the time that a process is
 * watched, whether it is a target or not.
 *
 * Threads are in `threads` when user space lists them, or when they are created later (task_newtask tells a thread from
 * a process). A wait begins where the kernel's own run_delay does: at the wake-up, or when a thread that still wants to
 * run is switched out; it ends when the thread is switched in. Not every switch or wake-up is reported: the kernel leaves
 * out a tracepoint's programs on a CPU where another BPF program or a bpf() call was interrupted (bpf_prog_active), and
 * some kernels hide switches away from certain tasks. That shows at the thread's next event, and the wait is counted as
 * lost.
 */
#ifndef SCHEDTRACE_THREAD_H
#define SCHEDTRACE_THREAD_H

#include "events.h"
#include "maps.h"
#include "current_goroutine.h"

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

/* The interval in which a goroutine ran for Go and its thread was off the CPU is over. */
static __always_inline void count_off_cpu(__u32 tid, struct thread *t, struct thread_stats *s, __u64 now)
{
	__u64 off_ns = now - t->off_since_ns, woken_ns = 0;

	send_off_cpu(tid, t, now);
	if (t->off_cpu == OFF_CPU_BLOCKED) {
		woken_ns = now - t->runnable_since_ns;
		record(&s->off_cpu[OFF_CPU_BLOCKED], off_ns - woken_ns);
		record(&s->off_cpu[OFF_CPU_WOKEN], woken_ns);
	} else {
		record(&s->off_cpu[OFF_CPU_PREEMPTED], off_ns);
	}

	struct process *process = processes.lookup(&t->slot);
	struct function_key key = { .start_pc = t->start_pc, .slot = t->slot };
	struct off_cpu_totals *sum;

	if (!process || !process->by_function)
		return;
	sum = off_cpu_functions.lookup(&key);
	if (!sum) {
		struct off_cpu_totals none = {};

		off_cpu_functions.insert(&key, &none);
		sum = off_cpu_functions.lookup(&key);
		if (!sum) {
			add(&s->lost[LOST_FUNCTIONS_FULL], 1);
			return;
		}
	}
	add(&sum->times, 1);
	if (t->off_cpu == OFF_CPU_BLOCKED) {
		add(&sum->run_queue_ns, woken_ns);
		add(&sum->blocked_ns, off_ns - woken_ns);
	} else {
		add(&sum->run_queue_ns, off_ns);
	}
	if (off_ns > sum->max_ns)
		sum->max_ns = off_ns;
}

/* The current thread is switched out. */
static __always_inline void switched_out(struct thread *t, __u64 now, int wants_to_run)
{
	struct thread_stats *s = thread_stats_of(t->slot);

	if (s && t->on_cpu == THREAD_OFF && t->runnable_since_ns)
		add(&s->lost[LOST_SWITCH_UNSEEN], 1); /* it waited, and its switch in was not seen */
	t->on_cpu = THREAD_OFF;
	t->runnable_since_ns = wants_to_run ? now : 0;
	t->off_cpu = wants_to_run ? OFF_CPU_PREEMPTED : OFF_CPU_BLOCKED;
	t->off_since_ns = s && runs_goroutine(t, s, now) ? now : 0;
}

static __always_inline void switched_in(__u32 tid, struct thread *t, __u64 now)
{
	struct thread_stats *s = thread_stats_of(t->slot);
	__u64 since = t->runnable_since_ns;

	if (s && !since) {
		add(&s->lost[t->on_cpu == THREAD_UNKNOWN ? LOST_BEGAN_BEFORE : LOST_SWITCH_UNSEEN], 1);
	} else if (s && now >= since) {
		struct wait *wait = &t->waits[t->waited++ % WAITS_KEPT];

		wait->begin_ns = since;
		wait->end_ns = now;
		record(&s->run_queue, now - since);
		if (t->off_since_ns && t->off_since_ns <= since)
			count_off_cpu(tid, t, s, now);
	}
	t->off_since_ns = 0;
	t->on_cpu = THREAD_ON;
	t->runnable_since_ns = 0;
}

TRACEPOINT_PROBE(sched, sched_switch)
{
	__u32 prev = args->prev_pid, next = args->next_pid;
	__u64 now = bpf_ktime_get_ns();
	struct thread *t;

	if (prev) { /* 0: a CPU's idle task */
		t = threads.lookup(&prev);
		if (t) {
			send_switch(t, now, (struct switch_event){
				.type = EVENT_THREAD_OFF,
				.flags = t->on_cpu == THREAD_OFF && t->runnable_since_ns ? FLAG_UNSEEN : 0,
				.tid = prev,
				.other_tid = next,
				.prev_state = args->prev_state,
			});
			switched_out(t, now, !(args->prev_state & PREV_STATE_MASK));
		}
	}
	if (next) {
		t = threads.lookup(&next);
		if (t) {
			send_switch(t, now, (struct switch_event){
				.type = EVENT_THREAD_ON,
				.flags = t->runnable_since_ns ? 0 :
					 t->on_cpu == THREAD_UNKNOWN ? FLAG_BEGAN_BEFORE : FLAG_UNSEEN,
				.tid = next,
				.since_ns = t->runnable_since_ns,
				.other_tid = prev,
			});
			switched_in(next, t, now);
		}
	}
	return 0;
}

/* The process is another program, or is gone: what it does is not recorded, and user space is told. */
static __always_inline void another_program(__u32 tgid)
{
	targets.delete(&tgid);
	process_slots.delete(&tgid);
	threads.delete(&tgid); /* of the threads none but this one is left */
}

TRACEPOINT_PROBE(task, task_newtask)
{
	__u32 tgid = bpf_get_current_pid_tgid() >> 32, tid = args->pid;
	struct process_slot *process;
	struct thread_stats *s;

	if (!(args->clone_flags & CLONE_THREAD)) {
		another_program(tid); /* a new process: if that id is known, it is of one that has ended */
		return 0;
	}
	process = process_slots.lookup(&tgid);
	if (!process)
		return 0;
	struct thread fresh = { .slot = process->slot, .on_cpu = THREAD_OFF };

	if (threads.update(&tid, &fresh)) {
		s = thread_stats_of(process->slot);
		if (s)
			add(&s->lost[LOST_THREADS_FULL], 1);
	}
	return 0;
}

TRACEPOINT_PROBE(sched, sched_process_exit)
{
	__u32 tid = args->pid;

	threads.delete(&tid);
	return 0;
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

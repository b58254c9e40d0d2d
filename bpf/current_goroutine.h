/* SPDX-License-Identifier: GPL-2.0
 *
 * Which goroutine the current thread runs, from the runtime's own structs in user memory: for tracepoints, where no
 * register tells. Nothing in it is believed unless it holds together: an m is the thread's only while m.procid is the
 * thread's own id, and a goroutine is the m's only if g.m leads back to it.
 *
 * The m of a thread is on the runtime's list of all of them, runtime.allm, newest first. It is looked for when the
 * thread leaves the CPU, a few at a time, and remembered.
 */
#ifndef SCHEDTRACE_CURRENT_GOROUTINE_H
#define SCHEDTRACE_CURRENT_GOROUTINE_H

#include "maps.h"
#include "user_memory.h"

#define WALK_LIMIT 16               /* ms looked at in one switch */
#define LOOK_AGAIN_NS 50000000ULL   /* a thread of C has no m until it calls Go */
#define SCAN_BIT 0x1000             /* in g.atomicstatus, while its stack is scanned */

/* bpf_get_ns_current_pid_tgid (Linux 5.7). */
static long (*read_namespace_ids)(__u64 device, __u64 inode, struct bpf_pidns_info *ids, __u32 size) =
	(void *)BPF_FUNC_get_ns_current_pid_tgid;

static __always_inline struct thread_stats *thread_stats_of(__u32 slot)
{
	return (struct thread_stats *)thread_stats.lookup(&slot);
}

/* The current thread's id as its process sees it, which is what the runtime has in m.procid; 0 not known. */
static __always_inline __u32 own_id(struct process *process)
{
	struct bpf_pidns_info ids = {};

	if (read_namespace_ids(process->pid_namespace_device, process->pid_namespace, &ids, sizeof(ids)))
		return 0;
	return ids.pid;
}

static __always_inline int is_own(struct process *process, struct thread *t, __u64 m)
{
	__u64 procid = 0;

	return !read_user(&procid, sizeof(procid), (void *)(m + process->m_procid)) && procid == t->procid;
}

/* Look for the m of the current thread; 0 if it isn't found, or not yet. */
static __always_inline __u64 find_m(struct process *process, struct thread *t, struct thread_stats *s, __u64 now)
{
	__u64 m = t->next_m;

	if (now < t->look_again_ns)
		return 0;
	if (!m && read_user(&m, sizeof(m), (void *)process->allm)) {
		add(&s->lost[LOST_UNREADABLE], 1);
		return 0;
	}
	for (int i = 0; i < WALK_LIMIT; i++) {
		if (!m)
			break;
		if (is_own(process, t, m)) {
			t->m = m;
			t->next_m = 0;
			return m;
		}
		if (read_user(&m, sizeof(m), (void *)(m + process->m_alllink)))
			m = 0; /* it has been freed since, or paged out: begin anew */
	}
	t->next_m = m;
	if (m)
		add(&s->lost[LOST_THREAD_UNKNOWN], 1);
	else
		t->look_again_ns = now + LOOK_AGAIN_NS;
	return 0;
}

/* A goroutine in this state runs for Go: its own code, or on the system stack in its name. */
static __always_inline int runs_for_go(struct process *process, __u32 status, __u64 g, struct thread_stats *s)
{
	__u8 reason = 0;

	if (status == STATE_RUNNING || status == STATE_COPYSTACK)
		return 1;
	if (status != STATE_WAITING)
		return 0;
	if (process->running_reasons == ~0ULL)
		return 1; /* the reason says nothing; a goroutine that has really parked is nobody's current one */
	if (read_user(&reason, sizeof(reason), (void *)(g + process->g_waitreason))) {
		add(&s->lost[LOST_UNREADABLE], 1);
		return 0;
	}
	return reason < REASON_COUNT && process->running_reasons >> reason & 1;
}

/* Does the current thread, as it leaves the CPU, run a goroutine? If so, t->start_pc is that one's, where
 * that is wanted. */
static __always_inline int runs_goroutine(struct thread *t, struct thread_stats *s, __u64 now)
{
	struct process *process = processes.lookup(&t->slot);
	__u64 m = t->m, g = 0, back = 0;
	__u32 status = 0;

	if (!process || !process->allm)
		return 0;
	if (!t->procid)
		t->procid = own_id(process);
	if (!t->procid)
		return 0;
	if (!m || !is_own(process, t, m))
		m = find_m(process, t, s, now);
	if (!m)
		return 0;
	if (read_user(&g, sizeof(g), (void *)(m + process->m_curg)))
		goto unreadable;
	if (!g)
		return 0; /* the scheduler, or a thread that has nothing to do */
	if (read_user(&status, sizeof(status), (void *)(g + process->g_atomicstatus)))
		goto unreadable;
	if (!runs_for_go(process, status & ~SCAN_BIT, g, s))
		return 0;
	if (read_user(&back, sizeof(back), (void *)(g + process->g_m)))
		goto unreadable;
	if (process->by_function && read_user(&t->start_pc, sizeof(t->start_pc), (void *)(g + process->g_startpc)))
		goto unreadable;
	if (back == m)
		return 1;
	if ((status & ~SCAN_BIT) == STATE_RUNNING)
		add(&s->lost[LOST_INCONSISTENT], 1);
	return 0; /* else it has parked, and is just being taken from its m */
unreadable:
	add(&s->lost[LOST_UNREADABLE], 1);
	return 0;
}

#endif

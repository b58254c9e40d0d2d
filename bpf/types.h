/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * Every struct, enum and constant that the BPF programs and user space share.
 *
 * This file is the authority: agent/abi.py repeats it as ctypes, tests/unit/test_abi.py compares the two through
 * this file's debug info, and session.py compares once more with what BCC derived, before it attaches anything.
 * Rules: fixed widths, explicit padding, sizes a multiple of 8, field names that are legal in Python.
 */
#ifndef SCHEDTRACE_TYPES_H
#define SCHEDTRACE_TYPES_H

#include <linux/types.h>
#include "event_types.h"

/* States are Go's own numbers (runtime2.go), with the scan bit masked off. 5 and 7 are no longer used by Go. */
enum goroutine_state {
	STATE_IDLE = 0,
	STATE_RUNNABLE = 1,
	STATE_RUNNING = 2,
	STATE_SYSCALL = 3,
	STATE_WAITING = 4,
	STATE_DEAD = 6,
	STATE_COPYSTACK = 8,
	STATE_PREEMPTED = 9,
	STATE_LEAKED = 10,
	STATE_DEADEXTRA = 11,
	STATE_COUNT = 12,
};

/* Why a goroutine became runnable. */
enum wake_cause {
	CAUSE_NEW = 0,
	CAUSE_PREEMPTED = 1,
	CAUSE_YIELDED = 2,
	CAUSE_CHANNEL = 3,
	CAUSE_SELECT = 4,
	CAUSE_MUTEX = 5,
	CAUSE_NETWORK = 6,
	CAUSE_TIMER = 7,
	CAUSE_SYSCALL = 8,
	CAUSE_GC = 9,
	CAUSE_OTHER = 10,
	CAUSE_UNKNOWN = 11,         /* a sample whose goroutine does not show it */
	CAUSE_COUNT = 12,
};

/* What it means that a probe is hit: which goroutine does what. */
enum probe_kind {
	KIND_UNKNOWN = 0,           /* no probe of the target is known at that address */
	KIND_CASGSTATUS = 1,        /* casgstatus(gp, old, new) or a call of it: the move, before the CAS is made */
	KIND_PARK = 2,              /* park_m(gp): it waits; gopark has stored the reason */
	KIND_READY = 3,             /* ready(gp, traceskip, next) */
	KIND_READY_LIST = 4,        /* injectglist(glist *gList): all that are on it, chained by g.schedlink */
	KIND_RUN = 5,               /* execute(gp, inheritTime) */
	KIND_CREATE = 6,            /* newproc's call of runqput(pp, gp, next): newproc1 has just made gp */
	KIND_CREATED = 7,           /* in newproc, behind its call of newproc1, whose result is the new goroutine */
	KIND_YIELD = 8,             /* goschedImpl(gp, preempted), goyield_m(gp): by its wish, or because it ran for too long */
	KIND_STOP = 9,              /* preemptPark(gp): at a safe point for suspendG (a scan of its stack), until readied */
	KIND_EXIT = 10,             /* gdestroy(gp), goexit0(gp) up to Go 1.21 */
	KIND_SYSCALL = 11,          /* reentersyscall, on the goroutine's own stack */
	KIND_SYSCALL_EXIT = 12,     /* exitsyscall, on the goroutine's own stack */
	KIND_SYSCALL_EXIT_NO_P = 13, /* exitsyscallNoP(gp), exitsyscall0(gp) up to Go 1.25: back, and no P is free */
	KIND_COROUTINE_SWITCH = 14, /* coroswitch_m(gp): gp stops or ends, and the goroutine of its coroutine runs at once */
	KIND_RECORD = 15,           /* (*timeHistogram).record(h, ns): the runtime's own sample of how long something took */
	KIND_STOP_WORLD = 16,       /* stopTheWorldWithSema(reason); up to Go 1.20 without a reason */
	KIND_START_WORLD = 17,      /* startTheWorldWithSema(now, reason, began, stopped, ...); so from Go 1.23 */
	KIND_COUNT = 18,
};

/* What the runtime hands to its histograms, by which of them it is. */
enum duration {
	DURATION_RUN = 0,            /* sched.timeToRun: how long a goroutine that begins to run was runnable */
	DURATION_STOPPING_GC = 1,    /* until all Ps had stopped, for the garbage collector */
	DURATION_STOPPING_OTHER = 2, /* and for other reasons */
	DURATION_STOPPED_GC = 3,     /* from the wish to stop until all run again */
	DURATION_STOPPED_OTHER = 4,
	DURATION_COUNT = 5,
};

/* What a goroutine did where it stopped, by the address at which it goes on. */
enum stop_place {
	PLACE_UNKNOWN = 0,
	PLACE_PARK = 1,              /* it waits: g.waitreason is the cause of its wake */
	PLACE_YIELD = 2,             /* Gosched and the like */
	PLACE_SYSCALL = 3,           /* back from a system call without a P */
	PLACE_PREEMPT = 4,           /* stopped by a signal */
	PLACE_COUNT = 5,
};

/* Everything that is not recorded, by reason. */
enum lost_reason {
	LOST_GOROUTINES_FULL = 0,   /* goroutines map full: this goroutine is not followed */
	LOST_FUNCTIONS_FULL = 1,    /* functions map full: its totals are missing from the top list */
	LOST_THREADS_FULL = 2,      /* threads map full: this thread's run-queue waits are not seen */
	LOST_INCONSISTENT = 3,      /* the state left is not the state last seen, and no known reason explains it */
	LOST_UNREADABLE = 4,        /* user memory that should be there could not be read */
	LOST_LIST_TOO_LONG = 5,     /* injectglist: goroutines beyond INJECT_LIMIT were not followed */
	LOST_BEGAN_BEFORE = 6,      /* interval began before the window: its length is not known, only its end */
	LOST_SWITCH_UNSEEN = 7,     /* a thread's wait for a CPU: the kernel did not report where it begins or ends */
	LOST_PROBE_UNKNOWN = 8,     /* a hit at an address that is none of the target's probes: what it means is not known */
	LOST_THREAD_UNKNOWN = 9,    /* a thread left the CPU before its runtime.m was found: perhaps it ran a goroutine */
	LOST_COUNT = 10,
};

/* Why a goroutine that runs for Go is off the CPU. */
enum off_cpu {
	OFF_CPU_PREEMPTED = 0,      /* its thread still wanted to run: all of it is a wait on the kernel's run queue */
	OFF_CPU_BLOCKED = 1,        /* its thread slept in the kernel (page fault, lock, raw system call), until the wake-up */
	OFF_CPU_WOKEN = 2,          /* then the thread waited on the run queue: behind each interval that is blocked */
	OFF_CPU_COUNT = 3,
};

/* A histogram slot k holds (2^(k-1), 2^k] microseconds, slot 0 all up to 1 us; the last one, all above 2^23 us
 * (8.39 s), is shown only as +Inf. */
#define HISTOGRAM_SLOTS 25
#define HISTOGRAM_UNIT_NS 1000
#define REASON_COUNT 64      /* g.waitreason is a byte; Go 1.27 has 47 reasons */
#define REASON_UNKNOWN 63    /* not read: the layout is not known, or the read failed */
#define OFFSET_UNKNOWN 0xffff
#define SITE_LIMIT 32        /* probes of one target, and a last place that stays empty, for addresses not known */
#define STOP_LIMIT 32        /* places where goroutines of one target stop; the runtime alone has 16 */
#define HITS_BATCH 16        /* see target.hits: a limit is overshot by at most so many a CPU and site, less one */
#define NO_LIMIT 0xffffffffffffffffULL
#define WAITS_KEPT 4         /* waits of a thread for a CPU, the last ones */
#define TIMED_SHIFT 58       /* of 1 << (64 - that) hits, about, one is timed */
#define TIMED_OFTEN_SHIFT 61
#define TIMED_MOST_NS 2000   /* a program that took longer was interrupted: it would tell of that, and not of caches */
#define STOP_REASON_UNKNOWN 0 /* as Go has it */
#define INJECT_LIMIT 256     /* what netpoll can hand over at once: 128 events, of which each may wake two */

struct histogram {
	__u64 slots[HISTOGRAM_SLOTS];
	__u64 sum_ns;
	__u64 max_ns;
};

/* targets[tgid]: filter, struct layout and identity in one lookup. */
struct target {
	__u64 attached_ns;           /* CLOCK_MONOTONIC; start of the window; 0: no time before a first move counts */
	__u64 hits;                  /* of its probes: only every HITS_BATCH-th of a site on a CPU looks, and adds so many */
	__u64 hits_limit;            /* that many hits end the window; NO_LIMIT */
	__u64 running_reasons;       /* bit r: waiting for reason r in fact runs on the system stack */
	__u64 stop_since_ns;         /* since when the world is stopped, or being stopped; 0: it is not, or not known */
	__u64 sites[SITE_LIMIT];     /* run-time addresses of its probes, the hottest first; 0 ends the list */
	__u8 kinds[SITE_LIMIT];      /* enum probe_kind of each of sites */
	__u32 slot;                  /* index into stats */
	__u32 window;                /* index into windows */
	__u16 g_waitreason;          /* byte offsets in runtime.g, or OFFSET_UNKNOWN */
	__u16 g_preempt;
	__u16 g_schedlink;
	__u16 g_syscallsp;
	__u16 g_startpc;
	__u16 g_coroarg;
	__u16 g_coroexit;
	__u16 coro_gp;
	__u16 g_goid;
	__u8 coroutine_reason;       /* number of the wait reason "coroutine" */
	__u8 stop_reasons;           /* how many reasons there are to stop the world; 0: they are not told */
	__u8 stop_reason;            /* of that stop */
	__u8 start_told;             /* whether startTheWorldWithSema is told when all had stopped */
	__u8 timed_often;            /* more of its hits are timed: it is what others are compared with */
	__u8 padding;
	__u8 cause_of_reason[REASON_COUNT]; /* wait reason -> enum wake_cause */
};

struct goroutine_key {
	__u64 g;                     /* address of its runtime.g */
	__u32 tgid;
	__u32 padding;
};

/* What one goroutine, or all that had the same start function, did since they were first seen. */
struct totals {
	__u64 goroutines;            /* created in the window */
	__u64 exits;
	__u64 parks;                 /* running -> waiting */
	__u64 readies;               /* waiting -> runnable */
	__u64 runs;                  /* runnable -> running */
	__u64 preempted;
	__u64 yielded;
	__u64 switches;              /* coroutine switches into it */
	__u64 syscalls;              /* syscall -> runnable or running, where seen */
	__u64 runnable_ns;
	__u64 running_ns;
	__u64 waiting_ns;
	__u64 syscall_ns;
	__u64 max_runnable_ns;
	__u64 max_waiting_ns;
};

struct goroutine {
	__u64 since_ns;              /* when it entered state */
	__u64 start_pc;              /* run-time address of its start function, 0 unknown */
	__u8 state;                  /* enum goroutine_state */
	__u8 reason;                 /* wait reason, valid while waiting */
	__u8 cause;                  /* enum wake_cause, valid while runnable */
	__u8 partial;                /* the current interval began before the window */
	__u8 switched;               /* enum coroutine_switch: a coroutine switch that casgstatus may report again */
	__u8 named;                  /* while recording: its id has been sent */
	__u8 padding[2];
	struct totals totals;
};

struct function_key {
	__u64 start_pc;
	__u32 slot;
	__u32 padding;
};

/* stats[slot], per CPU: monotonic, never cleared; user space subtracts. */
struct target_stats {
	__u64 transitions[STATE_COUNT * STATE_COUNT]; /* [from * STATE_COUNT + to] */
	struct histogram sched_latency[CAUSE_COUNT];
	struct histogram wait[REASON_COUNT];
	__u64 kernel_ns;             /* of all in sched_latency: the thread was runnable and not running */
	__u64 undivided_ns;          /* not known: nothing is known of the thread */
	__u64 partial_ns[STATE_COUNT]; /* time in intervals that are in no histogram: all of running and syscall */
	__u64 partial_wait_ns[REASON_COUNT]; /* of waiting that began before the window */
	__u64 partial_waits[REASON_COUNT];
	__u64 hits[SITE_LIMIT];      /* by index into target.sites */
	__u64 timed_ns;              /* of some hits: how long the program took */
	__u64 timed;                 /* how many those are */
	__u64 lost[LOST_COUNT];
	__u64 cgroup_id;             /* cgroup2 id of the thread of the last event; 1 where only v1 is used */
};

/* A thread was runnable and did not run; or the world was stopped. */
struct wait {
	__u64 begin_ns;
	__u64 end_ns;
};

/* samplers[tgid]: what the sampled level must know of a target. */
struct sampler {
	__u64 histograms[DURATION_COUNT]; /* run-time addresses; 0: the runtime has none */
	__u64 stops[STOP_LIMIT];     /* run-time addresses at which goroutines go on, most frequent first; 0 ends the list */
	__u8 places[STOP_LIMIT];     /* enum stop_place of each */
	__u64 mcall;                 /* run-time address of that function */
	struct wait stopped;         /* the world, the last time; end_ns is NO_LIMIT until all run again */
	__u16 g_m;                   /* byte offsets */
	__u16 m_curg;
	__u16 g_status;
	__u16 g_pc;                  /* of g.sched.pc */
	__u8 other_place;            /* enum stop_place behind all calls of mcall that are not listed */
	__u8 padding[7];
};

/* samples[slot], per CPU: monotonic, as stats. */
struct sample_stats {
	struct histogram sched_latency[CAUSE_COUNT];
	struct histogram stop_the_world[DURATION_COUNT]; /* the first is not used */
	__u64 no_wait;               /* samples of 0 ns: of what is no wait to run (see record.h) */
	__u64 kernel_ns;             /* of all in sched_latency: the thread was runnable and not running */
	__u64 stopped_ns;            /* the thread ran, and the world was stopped */
	__u64 undivided_ns;          /* not known: nothing is known of the thread */
};

/* Sent for every execve on the node, where the agent looks for Go processes. */
struct process_event {
	__u32 tgid;
	__u32 padding;
};

/* windows[i]: until when targets are counted that share probes. The first never ends. */
struct window {
	__u64 until_ns;              /* CLOCK_MONOTONIC; brought forward to now by a target that reaches its hits_limit */
};

/* Sent when a target has brought a window's end forward: its probes are to come out now. */
struct window_end {
	__u32 window;
	__u32 padding;
};

/* processes[slot]: one whose threads are watched, with or without probes in it. */
struct process {
	__u64 allm;                  /* run-time address of runtime.allm; 0: not known, so only the run queue is counted */
	__u64 running_reasons;       /* as in target */
	__u64 pid_namespace;         /* the one it sees its threads' ids in: inode and device, the latter as the kernel has it */
	__u64 pid_namespace_device;
	__u16 m_procid;              /* byte offsets in runtime.m and runtime.g */
	__u16 m_curg;
	__u16 m_alllink;
	__u16 g_m;
	__u16 g_atomicstatus;
	__u16 g_waitreason;
	__u16 g_startpc;
	__u8 by_function;            /* whether off_cpu_functions is wanted */
	__u8 is_recorded;            /* whether a recording is sent what its threads do */
	__u32 event_slot;            /* there it is the target of that number */
	__u32 padding;
};

/* process_slots[tgid] */
struct process_slot {
	__u32 slot;
	__u32 padding;
};

/* thread_stats[slot], per CPU: monotonic, as stats are. */
struct thread_stats {
	struct histogram run_queue;  /* threads: runnable for the kernel, not running */
	struct histogram off_cpu[OFF_CPU_COUNT]; /* goroutines running for Go, their threads off the CPU */
	__u64 lost[LOST_COUNT];
};

/* off_cpu_functions[(start_pc, slot)] */
struct off_cpu_totals {
	__u64 times;
	__u64 run_queue_ns;          /* preempted and woken */
	__u64 blocked_ns;
	__u64 max_ns;                /* from off the CPU until on it again */
};

/* threads[tid] of processes whose threads are watched. */
struct thread {
	__u64 runnable_since_ns;     /* 0: running, or blocked */
	__u64 m;                     /* address of its runtime.m, 0 not found; it is this thread's only while m.procid says so */
	__u64 next_m;                /* where to go on looking for it, 0 at the beginning */
	__u64 look_again_ns;         /* not before: it was not on the list */
	__u64 off_since_ns;          /* since when its goroutine runs for Go and it is off the CPU; 0: no such thing */
	__u64 start_pc;              /* of that goroutine */
	struct wait waits[WAITS_KEPT]; /* the last ones, the n-th since it is known at [n % WAITS_KEPT] */
	__u32 waited;                /* how many there were */
	__u32 slot;
	__u32 procid;                /* its id as it sees itself; 0 not known yet */
	__u8 on_cpu;                 /* 0: not known yet; else enum on_cpu of thread.h */
	__u8 off_cpu;                /* enum off_cpu: preempted or blocked */
	__u8 padding[2];
};

#endif

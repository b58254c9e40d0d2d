/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * What a recording is made of. docs/recording.md says what the fields mean; agent/events.py has them as they lie in files,
 * where they stay as they are. All have one size, and begin alike. The rules of types.h hold; agent/event_abi.py is the
 * ctypes side.
 */
#ifndef SCHEDTRACE_EVENT_TYPES_H
#define SCHEDTRACE_EVENT_TYPES_H

#include <linux/types.h>

enum event_type {
	EVENT_TRANSITION = 1,
	EVENT_GOROUTINE = 2,
	EVENT_THREAD_ON = 3,
	EVENT_THREAD_OFF = 4,
	EVENT_CGROUP = 5,
	EVENT_OFF_CPU = 6,
	EVENT_WAIT = 7,
	EVENT_STOP = 8,
	EVENT_THROTTLED = 9,         /* made by the recorder, which reads cpu.stat: there is no struct for it here */
};

enum event_flag {
	FLAG_BEGAN_BEFORE = 1,       /* that and the next are also the values of goroutine.partial */
	FLAG_INCONSISTENT = 2,
	FLAG_NO_INTERVAL = 4,
	FLAG_TAKEN_BACK = 8,
	FLAG_FIRST = 16,
	FLAG_UNSEEN = 32,
	FLAG_DIVIDED = 64,
	FLAG_BLOCKED = 128,
};

struct transition_event {
	__u64 time_ns;
	__u8 type;                   /* enum event_type */
	__u8 flags;                  /* enum event_flag */
	__u16 slot;
	__u32 tid;
	__u64 g;
	__u64 since_ns;
	__u16 cpu;
	__u8 old;
	__u8 new;
	__u8 left;
	__u8 cause;
	__u8 reason;
	__u8 padding;
};

struct goroutine_event {
	__u64 time_ns;
	__u8 type;
	__u8 flags;
	__u16 slot;
	__u32 tid;
	__u64 g;
	__u64 start_pc;
	__u64 goid;
};

struct switch_event {
	__u64 time_ns;
	__u8 type;
	__u8 flags;
	__u16 slot;
	__u32 tid;
	__u64 since_ns;
	__u32 other_tid;
	__u32 prev_state;
	__u16 cpu;
	__u8 padding[6];
};

struct cgroup_event {
	__u64 time_ns;
	__u8 type;
	__u8 flags;
	__u16 slot;
	__u32 tid;
	__u64 cgroup_id;
	__u64 unused;
	__u16 cpu;
	__u8 padding[6];
};

struct off_cpu_event {
	__u64 time_ns;
	__u8 type;
	__u8 flags;
	__u16 slot;
	__u32 tid;
	__u64 off_since_ns;
	__u64 runnable_since_ns;
	__u64 start_pc;
};

struct wait_event {
	__u64 time_ns;
	__u8 type;
	__u8 flags;
	__u16 slot;
	__u32 tid;
	__u64 g;
	__u64 kernel_ns;
	__u64 undivided_ns;
};

struct stop_event {
	__u64 time_ns;
	__u8 type;
	__u8 flags;
	__u16 slot;
	__u32 tid;
	__u64 since_ns;
	__u64 stopped_ns;
	__u8 reason;
	__u8 padding[7];
};

#endif

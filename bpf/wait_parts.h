/* SPDX-License-Identifier: GPL-2.0
 *
 * What a goroutine waited for that was runnable until now, and runs on this thread. While the thread was runnable and not
 * running, for the kernel; of the rest, while the world was stopped, for that; else in a queue of Go's.
 */
#ifndef SCHEDTRACE_WAIT_PARTS_H
#define SCHEDTRACE_WAIT_PARTS_H

#include "maps.h"

struct wait_parts {
	__u64 kernel_ns;
	__u64 stopped_ns;
	__u64 undivided_ns;          /* not known what for */
};

static __always_inline __u64 overlap(__u64 begin, __u64 end, __u64 other_begin, __u64 other_end)
{
	if (other_begin > begin)
		begin = other_begin;
	if (other_end < end)
		end = other_end;
	return end > begin ? end - begin : 0;
}

/* The wait [begin, end], divided. `stopped`: the last time that the world was stopped; of no length if it is not known. */
static __always_inline struct wait_parts divide(__u64 begin, __u64 end, struct wait stopped)
{
	__u32 tid = bpf_get_current_pid_tgid();
	struct thread *t = threads.lookup(&tid);
	struct wait_parts parts = {};
	__u64 both = 0;

	if (!t) {
		parts.undivided_ns = end - begin;
		return parts;
	}
	if (t->waited > WAITS_KEPT) {
		/* What the thread did before the oldest wait that is kept, nobody knows. */
		__u64 known = t->waits[t->waited % WAITS_KEPT].begin_ns;

		if (known > end)
			known = end;
		if (known > begin) {
			parts.undivided_ns = known - begin;
			begin = known;
		}
	}
#pragma clang loop unroll(disable)
	for (__u32 i = 0; i < WAITS_KEPT; i++) {
		struct wait *wait = &t->waits[i];
		__u64 ns = overlap(begin, end, wait->begin_ns, wait->end_ns);

		if (!ns)
			continue;
		parts.kernel_ns += ns;
		both += overlap(wait->begin_ns > begin ? wait->begin_ns : begin, wait->end_ns < end ? wait->end_ns : end,
				stopped.begin_ns, stopped.end_ns);
	}
	parts.stopped_ns = overlap(begin, end, stopped.begin_ns, stopped.end_ns) - both;
	return parts;
}

#endif

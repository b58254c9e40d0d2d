/* SPDX-License-Identifier: GPL-2.0 */
#ifndef SCHEDTRACE_HIT_H
#define SCHEDTRACE_HIT_H

#include "types.h"

/* One hit of a probe in a process that is a target. */
struct hit {
	struct target *target;
	struct target_stats *stats;
	__u64 now_ns;
	__u32 tgid;
	__u32 tid;
	__u32 kind; /* enum probe_kind */
	__u64 *events_lost; /* while recording */
};

#endif

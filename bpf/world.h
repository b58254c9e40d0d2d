/* SPDX-License-Identifier: GPL-2.0
 *
 * Stops of the world, while recording: from stopTheWorldWithSema to startTheWorldWithSema. There is one at a time.
 */
#ifndef SCHEDTRACE_WORLD_H
#define SCHEDTRACE_WORLD_H

#include "goabi.h"
#include "goroutine.h"

static __always_inline void send_stop(struct hit *hit, __u64 stopped_ns)
{
	struct target *target = hit->target;
	struct stop_event event = {
		.time_ns = hit->now_ns,
		.type = EVENT_STOP,
		.flags = target->stop_since_ns ? 0 : FLAG_BEGAN_BEFORE,
		.slot = target->slot,
		.tid = hit->tid,
		.since_ns = target->stop_since_ns,
		.reason = STOP_REASON_UNKNOWN,
	};

	if (event.since_ns && target->stop_reason < target->stop_reasons)
		event.reason = target->stop_reason;
	/* The target's clock may be another one: it can be in a time namespace of its own. */
	if (event.since_ns && stopped_ns >= event.since_ns && stopped_ns <= hit->now_ns)
		event.stopped_ns = stopped_ns;
	send(&event, hit->events_lost);
}

/* 0 if the probe is none of these. */
static __always_inline int stop_or_start_world(struct pt_regs *ctx, struct hit *hit)
{
	if (!RECORDING)
		return 0;
	if (hit->kind == KIND_STOP_WORLD) {
		hit->target->stop_since_ns = hit->now_ns;
		hit->target->stop_reason = GO_ARG0(ctx);
		return 1;
	}
	if (hit->kind != KIND_START_WORLD)
		return 0;
	send_stop(hit, hit->target->start_told ? GO_ARG3(ctx) : 0);
	hit->target->stop_since_ns = 0;
	return 1;
}

#endif

/* SPDX-License-Identifier: GPL-2.0
 *
 * What one writes first: every call of a function is an event, which is sent to user space with what it is about.
 */
#include <uapi/linux/ptrace.h>
#include "goabi.h"

struct event {
	u64 time_ns;
	u64 argument;
	u32 tid;
	u32 function;
};

BPF_PERF_OUTPUT(events);

static int send(struct pt_regs *ctx, u32 function)
{
	struct event event = {};

	event.time_ns = bpf_ktime_get_ns();
	event.argument = GO_ARG0(ctx);
	event.tid = bpf_get_current_pid_tgid();
	event.function = function;
	events.perf_submit(ctx, &event, sizeof(event));
	return 0;
}

int on_gopark(struct pt_regs *ctx)
{
	return send(ctx, 0);
}

int on_ready(struct pt_regs *ctx)
{
	return send(ctx, 1);
}

int on_execute(struct pt_regs *ctx)
{
	return send(ctx, 2);
}

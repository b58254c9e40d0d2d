/* SPDX-License-Identifier: GPL-2.0
 *
 * The parts that the programs of bpf/ are made of, each alone in a program that is otherwise empty: what
 * bench/hit_cost.py compares. All return 0, as the real ones do: else the kernel goes on to write a perf event.
 */
#include <uapi/linux/ptrace.h>
#include "types.h"
#include "goabi.h"

BPF_HASH(targets, __u32, struct target, 2);
BPF_HASH(goroutines, struct goroutine_key, struct goroutine, 1 << 17);
BPF_PERCPU_ARRAY(stats, struct target_stats, 2);

int empty(struct pt_regs *ctx)
{
	return 0;
}

int targets_lookup(struct pt_regs *ctx)
{
	__u32 tgid = bpf_get_current_pid_tgid() >> 32;

	targets.lookup(&tgid);
	return 0;
}

int goroutine_lookup(struct pt_regs *ctx)
{
	struct goroutine_key key = { .g = GO_ARG0(ctx), .tgid = TGID };

	goroutines.lookup(&key);
	return 0;
}

/* Also what comes of finding it: its record is read and written. */
int goroutine_update(struct pt_regs *ctx)
{
	struct goroutine_key key = { .g = GO_ARG0(ctx), .tgid = TGID };
	struct goroutine *g = goroutines.lookup(&key);

	if (g) {
		g->totals.runnable_ns += g->since_ns;
		g->totals.runs++;
		g->state = STATE_RUNNING;
	}
	return 0;
}

int stats_lookup(struct pt_regs *ctx)
{
	__u32 slot = 0;

	stats.lookup(&slot);
	return 0;
}

/* A hit counts itself, its transition, and in a histogram. */
int atomic_adds(struct pt_regs *ctx)
{
	__u32 slot = 0;
	struct target_stats *s = stats.lookup(&slot);

	if (s) {
		__sync_fetch_and_add(&s->hits[0], 1);
		__sync_fetch_and_add(&s->transitions[1], 1);
		__sync_fetch_and_add(&s->sched_latency[0].slots[2], 1);
		__sync_fetch_and_add(&s->sched_latency[0].sum_ns, 1);
	}
	return 0;
}

int ktime(struct pt_regs *ctx)
{
	bpf_ktime_get_ns();
	return 0;
}

int cgroup_id(struct pt_regs *ctx)
{
	bpf_get_current_cgroup_id();
	return 0;
}

int user_read(struct pt_regs *ctx)
{
	__u8 byte;

	bpf_probe_read_user(&byte, sizeof(byte), (void *)GO_ARG0(ctx));
	return 0;
}

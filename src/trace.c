// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * The tracepoints of trace.h, for trace.rs. This file is in C because the
 * kernel crate can call only the kernel's own tracepoints.
 */

#ifndef PEERMEM_FOUND
#include <compat-found.h>
#endif
/*
 * If NOTRACE is defined, linux/tracepoint.h makes tracepoints that do nothing.
 */
#ifndef PEERMEM_HAS_TRACEPOINTS
#define NOTRACE
#endif

#include "helpers.h"

#ifdef PEERMEM_HAS_TRACEPOINTS
#define CREATE_TRACE_POINTS
#endif
#include "trace.h"

void peermem_trace_refused(const char *mode, const char *step,
			   const char *reason, int code, u64 addr, u64 len,
			   pid_t tgid)
{
	trace_refused(mode, step, reason, code, addr, len, tgid);
}

/* Returns true if any of the following tracepoints is enabled. */
bool peermem_trace_is_enabled(void)
{
	return trace_registered_enabled() || trace_mapped_enabled() ||
	       trace_revoked_enabled() || trace_released_enabled();
}

void peermem_trace_registered(u64 id, const char *mode, u64 addr, u64 len,
			      u64 page, u64 chunks, pid_t tgid)
{
	trace_registered(id, mode, addr, len, page, chunks, tgid);
}

void peermem_trace_mapped(u64 id, u32 entries, u64 hca)
{
	trace_mapped(id, entries, hca);
}

void peermem_trace_revoked(u64 id)
{
	trace_revoked(id);
}

void peermem_trace_released(u64 id, const char *state)
{
	trace_released(id, state);
}

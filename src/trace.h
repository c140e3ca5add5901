/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * Tracepoints: docs/observe.md promises their fields to programs.
 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM nvidia_peermem

#if !defined(PEERMEM_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define PEERMEM_TRACE_H

#include <linux/tracepoint.h>

TRACE_EVENT(refused,
	TP_PROTO(const char *flavour, const char *step, const char *reason,
		 int code, u64 addr, u64 len, pid_t tgid),
	TP_ARGS(flavour, step, reason, code, addr, len, tgid),
	TP_STRUCT__entry(
		__field(u64, addr)
		__field(u64, len)
		__field(int, code)
		__field(pid_t, tgid)
		__string(flavour, flavour)
		__string(step, step)
		__string(reason, reason)
	),
	TP_fast_assign(
		__entry->addr = addr;
		__entry->len = len;
		__entry->code = code;
		__entry->tgid = tgid;
		__assign_str(flavour);
		__assign_str(step);
		__assign_str(reason);
	),
	TP_printk("flavour=%s step=%s reason=%s code=%d addr=%#llx len=%llu tgid=%d",
		  __get_str(flavour), __get_str(step), __get_str(reason),
		  __entry->code, __entry->addr, __entry->len, __entry->tgid)
);

#endif /* PEERMEM_TRACE_H */

/* Kbuild has this folder among those of sys_c.c. */
#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE trace
#include <trace/define_trace.h>

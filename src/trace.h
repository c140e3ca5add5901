/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * Tracepoints: docs/observe.md specifies their fields for programs.
 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM nvidia_peermem

#if !defined(PEERMEM_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define PEERMEM_TRACE_H

#include <linux/pci.h>
#include <linux/tracepoint.h>

/*
 * Copies the string into the room that __string() reserved. __assign_str() has
 * taken one argument since 6.10, and took two before.
 */
#define ASSIGN_STRING(_field)						\
	memcpy(__get_str(_field), _field, __get_dynamic_array_len(_field))

TRACE_EVENT(refused,
	TP_PROTO(const char *mode, const char *step, const char *reason,
		 int code, u64 addr, u64 len, pid_t tgid),
	TP_ARGS(mode, step, reason, code, addr, len, tgid),
	TP_STRUCT__entry(
		__field(u64, addr)
		__field(u64, len)
		__field(int, code)
		__field(pid_t, tgid)
		__string(mode, mode)
		__string(step, step)
		__string(reason, reason)
	),
	TP_fast_assign(
		__entry->addr = addr;
		__entry->len = len;
		__entry->code = code;
		__entry->tgid = tgid;
		ASSIGN_STRING(mode);
		ASSIGN_STRING(step);
		ASSIGN_STRING(reason);
	),
	TP_printk("mode=%s step=%s reason=%s code=%d addr=%#llx len=%llu tgid=%d",
		  __get_str(mode), __get_str(step), __get_str(reason),
		  __entry->code, __entry->addr, __entry->len, __entry->tgid)
);

TRACE_EVENT(registered,
	TP_PROTO(u64 id, const char *mode, u64 addr, u64 len, u64 page,
		 u64 chunks, pid_t tgid),
	TP_ARGS(id, mode, addr, len, page, chunks, tgid),
	TP_STRUCT__entry(
		__field(u64, id)
		__field(u64, addr)
		__field(u64, len)
		__field(u64, page)
		__field(u64, chunks)
		__field(pid_t, tgid)
		__string(mode, mode)
	),
	TP_fast_assign(
		__entry->id = id;
		__entry->addr = addr;
		__entry->len = len;
		__entry->page = page;
		__entry->chunks = chunks;
		__entry->tgid = tgid;
		ASSIGN_STRING(mode);
	),
	TP_printk("id=%llu mode=%s addr=%#llx len=%llu page=%llu chunks=%llu tgid=%d",
		  __entry->id, __get_str(mode), __entry->addr, __entry->len,
		  __entry->page, __entry->chunks, __entry->tgid)
);

/* Room for a PCI address with a domain of 32 bits. */
#define PEERMEM_TRACE_PCI	20

TRACE_EVENT(mapped,
	TP_PROTO(u64 id, u32 entries, u64 hca),
	TP_ARGS(id, entries, hca),
	TP_STRUCT__entry(
		__field(u64, id)
		__field(u32, entries)
		__array(char, hca, PEERMEM_TRACE_PCI)
	),
	TP_fast_assign(
		__entry->id = id;
		__entry->entries = entries;
		scnprintf(__entry->hca, PEERMEM_TRACE_PCI, "%04llx:%02x:%02x.%x",
			  hca >> 16, (u8)PCI_BUS_NUM(hca), (u8)PCI_SLOT(hca),
			  (u8)PCI_FUNC(hca));
	),
	TP_printk("id=%llu entries=%u hca=%s",
		  __entry->id, __entry->entries, __entry->hca)
);

TRACE_EVENT(revoked,
	TP_PROTO(u64 id),
	TP_ARGS(id),
	TP_STRUCT__entry(
		__field(u64, id)
	),
	TP_fast_assign(
		__entry->id = id;
	),
	TP_printk("id=%llu", __entry->id)
);

TRACE_EVENT(released,
	TP_PROTO(u64 id, const char *state),
	TP_ARGS(id, state),
	TP_STRUCT__entry(
		__field(u64, id)
		__string(state, state)
	),
	TP_fast_assign(
		__entry->id = id;
		ASSIGN_STRING(state);
	),
	TP_printk("id=%llu state=%s", __entry->id, __get_str(state))
);

#endif /* PEERMEM_TRACE_H */

/* Kbuild adds this folder to the include paths of trace.c. */
#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE trace
#include <trace/define_trace.h>

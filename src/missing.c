// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Whether the neighbours have what this module calls.
 *
 * A module that needs a symbol which nobody exports is not loaded, and its user
 * is told "Unknown symbol". So here, and by ib.rs and nv.rs in Rust, what both
 * neighbours export is made weak: the kernel loads the module all the same, and
 * its init looks here and says what is missing. It must, before anything else:
 * the address of a weak symbol that nobody exports is 0.
 *
 * Nothing else changes by that. What is there is bound as ever, with the
 * reference that keeps its module loaded, and with the check of its version:
 * one that does not match is the kernel's to refuse, weak or not. depmod and
 * modpost make the same dependencies of it. modpost alone passes over a weak
 * symbol that it does not know; the Kbuild looks in its place.
 */

#include <linux/array_size.h>
#include <linux/types.h>

#include "../rust-bindings/peermem.h"
#include "missing.h"

#pragma weak ib_register_peer_memory_client
#pragma weak ib_unregister_peer_memory_client
#pragma weak nvidia_p2p_get_pages
#pragma weak nvidia_p2p_put_pages
#pragma weak nvidia_p2p_dma_map_pages
#pragma weak nvidia_p2p_dma_unmap_pages
#pragma weak nvidia_p2p_get_pages_persistent
#pragma weak nvidia_p2p_put_pages_persistent

struct needed {
	const void *address;
	const char *name;
};

#define NEEDED(function) { function, #function }

static const char *first_missing(const struct needed *all, size_t count)
{
	size_t i;

	for (i = 0; i < count; i++)
		if (!all[i].address)
			return all[i].name;
	return NULL;
}

/* The first function of ib_core's that is not there, or NULL. */
const char *peermem_missing_ib(void)
{
	static const struct needed all[] = {
		NEEDED(ib_register_peer_memory_client),
		NEEDED(ib_unregister_peer_memory_client),
	};

	return first_missing(all, ARRAY_SIZE(all));
}

/* As above, of nvidia.ko's. Those that older drivers lack come last. */
const char *peermem_missing_nv(void)
{
	static const struct needed all[] = {
		NEEDED(nvidia_p2p_get_pages),
		NEEDED(nvidia_p2p_put_pages),
		NEEDED(nvidia_p2p_dma_map_pages),
		NEEDED(nvidia_p2p_dma_unmap_pages),
		NEEDED(nvidia_p2p_get_pages_persistent),
		NEEDED(nvidia_p2p_put_pages_persistent),
	};

	return first_missing(all, ARRAY_SIZE(all));
}

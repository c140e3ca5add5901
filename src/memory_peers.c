// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Makes /sys/kernel/mm/memory_peers, if ib_core does not.
 *
 * ib_core shows its peer-memory clients in this directory if it can. Since
 * Linux 6.4, ib_core cannot do so, because mm_kobj is no longer exported.
 * Software that looks only in this directory then works without GPUDirect RDMA,
 * and prints no message. This module therefore shows its own clients, in
 * ib_core's format, unless ib_core does.
 *
 * This is a hack: kernel_kobj and kernfs_find_and_get_ns() are exported, and
 * together they lead to the object that is not exported. The hack has a file of
 * its own, and is not part of helpers.c, so that it is easy to remove. The file
 * is in C because the kernel crate has neither kobjects nor kernfs, and all of
 * the Rust code would be unsafe.
 *
 * The order of calls is: probe, register all clients with ib_core, show; hide,
 * unregister the clients. If ib_core can show clients, it makes the directory
 * for its first client at the latest. ib_core makes a client's own directory
 * before the registration of that client returns. If this module had already
 * made the client's directory, ib_core would refuse the client. After the
 * registrations, a missing directory will not appear any more. An existing
 * directory stays until the client is unregistered.
 *
 * This file never writes to a memory_peers of another module, since the owner
 * may remove the directory and its kobject at any time.
 *
 * Objects that may outlive this module contain no code of this module:
 * kobject_create_and_add() makes them, and they free themselves. The attributes
 * belong to this module. kobject_del() waits until nobody runs functions of the
 * attributes. The attribute functions take no lock and do not sleep. Nobody can
 * delay these functions, because their output is copied to the reader after
 * they have returned. kobject_del() does not wait for readers that only have a
 * file open. Such readers get -ENODEV from then on.
 */

#define pr_fmt(fmt) "nvidia-peermem: " fmt

#include <linux/compiler.h>
#include <linux/kernel.h>
#include <linux/kernfs.h>
#include <linux/kobject.h>
#include <linux/module.h>
#include <linux/printk.h>
#include <linux/stddef.h>
#include <linux/sysfs.h>

#include "compat.h"
#include "memory_peers.h"

#ifdef PEERMEM_HAS_MEMORY_PEERS

#define DIRECTORY	"memory_peers"

static bool memory_peers = true;
module_param(memory_peers, bool, 0444);
MODULE_PARM_DESC(memory_peers,
		 "Show the clients in /sys/kernel/mm/memory_peers where ib_core does not: Y [default] or N");

/*
 * The object behind /sys/kernel/mm. This file holds a reference from
 * peermem_memory_peers_probe() to peermem_memory_peers_hide().
 */
static struct kobject *mm;
/*
 * True if a client of the same name existed before the registration with
 * ib_core.
 */
static bool was_there;

static struct kobject *directory;
static struct {
	struct kobject *kobj;
	const u64 *counters;
} shown[PEERMEM_PEERS];

/* The files of the counters, in the order of struct peermem_peer. */
static struct kobj_attribute files[PEERMEM_COUNTERS];

static ssize_t version_show(struct kobject *kobj, struct kobj_attribute *attr,
			    char *buf)
{
	return scnprintf(buf, PAGE_SIZE, "%s\n", PEERMEM_VERSION);
}

static ssize_t counter_show(struct kobject *kobj, struct kobj_attribute *attr,
			    char *buf)
{
	int i;

	/*
	 * An entry of shown[] is set before its files are made, and cleared
	 * after its files are removed.
	 */
	for (i = 0; i < PEERMEM_PEERS; i++)
		if (shown[i].kobj == kobj)
			return scnprintf(buf, PAGE_SIZE, "%llu\n",
					 READ_ONCE(shown[i].counters[attr - files]));
	return -ENODEV;
}

static struct kobj_attribute version = __ATTR_RO(version);

#define COUNTER(_name)	__ATTR(num_##_name, 0444, counter_show, NULL)

static struct kobj_attribute files[PEERMEM_COUNTERS] = {
	COUNTER(alloc_mrs),
	COUNTER(dealloc_mrs),
	COUNTER(reg_pages),
	COUNTER(dereg_pages),
	COUNTER(reg_bytes),
	COUNTER(dereg_bytes),
	COUNTER(free_callbacks),
};

static struct attribute *attrs[] = {
	&version.attr,
	&files[0].attr,
	&files[1].attr,
	&files[2].attr,
	&files[3].attr,
	&files[4].attr,
	&files[5].attr,
	&files[6].attr,
	NULL
};

static const struct attribute_group group = {
	.attrs = attrs,
};

/*
 * Returns the object behind /sys/kernel/mm, or NULL. The object is made at boot
 * and never freed, so the pointer stays valid after the node is put.
 */
static struct kobject *mm_get(void)
{
	struct kernfs_node *node;
	struct kobject *kobj = NULL;

	/* Without sysfs there is no kernel_kobj. */
	if (!IS_ENABLED(CONFIG_SYSFS))
		return NULL;

	node = kernfs_find_and_get(kernel_kobj->sd, "mm");
	if (!node)
		return NULL;
	if (kernfs_type(node) == KERNFS_DIR)
		kobj = node->priv;
	/* Use node->priv only if it is this kobject, as in current kernels. */
	if (kobj && kobj->sd == node && kobj->parent == kernel_kobj)
		kobject_get(kobj);
	else
		kobj = NULL;
	kernfs_put(node);
	return kobj;
}

static void mm_put(void)
{
	kobject_put(mm);
	mm = NULL;
}

/* Returns a directory in @parent, with a reference, or NULL. */
static struct kernfs_node *find(struct kernfs_node *parent, const char *name)
{
	struct kernfs_node *node = kernfs_find_and_get(parent, name);

	if (!node || kernfs_type(node) == KERNFS_DIR)
		return node;
	kernfs_put(node);
	return NULL;
}

static bool has(struct kernfs_node *parent, const char *name)
{
	struct kernfs_node *node = find(parent, name);

	kernfs_put(node);
	return node;
}

static void not_shown(const char *why)
{
	pr_notice("/sys/kernel/mm/" DIRECTORY " does not show this module, and software that looks only there does not find it: %s\n",
		  why);
}

/*
 * Checks whether there is already a client @name. Called before the first
 * client is registered with ib_core. Undone by peermem_memory_peers_hide().
 */
void peermem_memory_peers_probe(const char *name)
{
	struct kernfs_node *peers;

	was_there = false;
	if (!memory_peers)
		return;
	mm = mm_get();
	if (!mm)
		return;
	peers = find(mm->sd, DIRECTORY);
	if (peers)
		was_there = has(peers, name);
	kernfs_put(peers);
}

/* Returns true if ib_core or another module has made DIRECTORY. */
static bool taken(const struct peermem_peer *peers, unsigned int count)
{
	struct kernfs_node *node = kernfs_find_and_get(mm->sd, DIRECTORY);
	bool all = node && kernfs_type(node) == KERNFS_DIR;
	unsigned int i;

	if (!node)
		return false;
	for (i = 0; all && i < count; i++)
		all = has(node, peers[i].name);
	kernfs_put(node);

	/*
	 * If the directory were ib_core's, ib_core would have refused a second
	 * client of this name.
	 */
	if (all && was_there)
		pr_notice("/sys/kernel/mm/" DIRECTORY "/%s is not this module's: it existed before\n",
			  peers[0].name);
	else if (!all)
		not_shown("another module owns the directory, and does not show these clients");
	return true;
}

static bool show(const struct peermem_peer *peer, unsigned int i)
{
	shown[i].counters = peer->counters;
	shown[i].kobj = kobject_create_and_add(peer->name, directory);
	return shown[i].kobj && !sysfs_create_group(shown[i].kobj, &group);
}

static void remove(struct kobject *kobj)
{
	if (!kobj)
		return;
	/* The last reference may be held elsewhere, so delete explicitly. */
	kobject_del(kobj);
	kobject_put(kobj);
}

static void remove_all(void)
{
	int i;

	/*
	 * The order is reversed, because counter_show() of one client reads the
	 * entries of the clients before it.
	 */
	for (i = PEERMEM_PEERS - 1; i >= 0; i--) {
		remove(shown[i].kobj);
		shown[i].kobj = NULL;
		shown[i].counters = NULL;
	}
	remove(directory);
	directory = NULL;
}

/*
 * Shows the @count clients, at most PEERMEM_PEERS. Called when all clients are
 * registered. The clients' counters are read until peermem_memory_peers_hide().
 */
void peermem_memory_peers_show(const struct peermem_peer *peers,
			       unsigned int count)
{
	unsigned int i;

	if (!memory_peers)
		return;
	if (!mm) {
		not_shown("/sys/kernel/mm was not found");
		return;
	}
	if (taken(peers, count)) {
		mm_put();
		return;
	}

	directory = kobject_create_and_add(DIRECTORY, mm);
	for (i = 0; directory && i < count; i++)
		if (!show(&peers[i], i))
			remove_all();
	if (!directory) {
		mm_put();
		not_shown("the directory cannot be created");
	}
}

/* Called before the clients are unregistered, or instead of showing them. */
void peermem_memory_peers_hide(void)
{
	remove_all();
	mm_put();
}

#else

/* If the kernel lacks a required function, nothing is shown. */

void peermem_memory_peers_probe(const char *name)
{
}

void peermem_memory_peers_show(const struct peermem_peer *peers,
			       unsigned int count)
{
}

void peermem_memory_peers_hide(void)
{
}

#endif

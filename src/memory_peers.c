// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * /sys/kernel/mm/memory_peers, where ib_core does not have it.
 *
 * ib_core shows its peer-memory clients there if it can. Since Linux 6.4 it
 * cannot: mm_kobj is not exported any more. Software that looks nowhere else
 * then works without GPUDirect RDMA, and does not say so. So this module shows
 * its own clients, as ib_core would, unless ib_core does.
 *
 * It is a hack: kernel_kobj and kernfs_find_and_get_ns() are exported, and
 * together lead to the object that is not. Hence a file of its own, which can
 * go without a trace, and not a part of helpers.c; and hence in C, for the kernel
 * crate knows neither kobjects nor kernfs, and nothing would be left that is
 * not unsafe.
 *
 * The order is: probe, register all clients with ib_core, show; hide, unregister
 * them. An ib_core that has the directory makes it at the latest with its first
 * client, and a client's own before it returns from its registration. Before
 * that, a directory of ours would be in its way, and make it refuse the client.
 * After that, whatever is missing will not come, and what is there stays until
 * the client is unregistered.
 *
 * A memory_peers that is not ours is never written to: whoever made it may
 * remove it, and its kobject with it, at any time.
 *
 * What may outlive this module has no code of this module: the objects are
 * those of kobject_create_and_add(), which frees them itself. The attributes
 * are ours. kobject_del() waits until nobody runs their functions any more;
 * these take no lock and do not sleep, and nobody can hold them up, since what
 * they print is copied to the reader when they have returned. Who only has a
 * file open is not waited for, and reads -ENODEV from then on.
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

/* /sys/kernel/mm, from probe to hide; referenced. */
static struct kobject *mm;
/* Somebody had a client of our name before ib_core knew us. */
static bool was_there;

static struct kobject *directory;
static struct {
	struct kobject *kobj;
	const struct peermem_stats *stats;
} shown[PEERMEM_PEERS];

/* A file that shows a member of struct peermem_stats. */
struct counter {
	struct kobj_attribute attr;
	size_t offset;
};

static ssize_t version_show(struct kobject *kobj, struct kobj_attribute *attr,
			    char *buf)
{
	return scnprintf(buf, PAGE_SIZE, "%s\n", PEERMEM_VERSION);
}

static ssize_t counter_show(struct kobject *kobj, struct kobj_attribute *attr,
			    char *buf)
{
	size_t offset = container_of(attr, struct counter, attr)->offset;
	int i;

	/* Is in there before it has files, and until it has none. */
	for (i = 0; i < PEERMEM_PEERS; i++) {
		const void *stats = shown[i].stats;

		if (shown[i].kobj == kobj)
			return scnprintf(buf, PAGE_SIZE, "%llu\n",
					 READ_ONCE(*(const u64 *)(stats + offset)));
	}
	return -ENODEV;
}

static struct kobj_attribute version = __ATTR_RO(version);

#define COUNTER(_member)						\
	static struct counter num_##_member = {				\
		.attr = __ATTR(num_##_member, 0444, counter_show, NULL),	\
		.offset = offsetof(struct peermem_stats, _member),	\
	}

COUNTER(alloc_mrs);
COUNTER(dealloc_mrs);
COUNTER(reg_pages);
COUNTER(dereg_pages);
COUNTER(reg_bytes);
COUNTER(dereg_bytes);
COUNTER(free_callbacks);

static struct attribute *attrs[] = {
	&version.attr,
	&num_alloc_mrs.attr.attr,
	&num_dealloc_mrs.attr.attr,
	&num_reg_pages.attr.attr,
	&num_dereg_pages.attr.attr,
	&num_reg_bytes.attr.attr,
	&num_dereg_bytes.attr.attr,
	&num_free_callbacks.attr.attr,
	NULL
};

static const struct attribute_group group = {
	.attrs = attrs,
};

/*
 * The object behind /sys/kernel/mm, or NULL. It is made at boot, and never
 * goes: the node's pointer to it is good also when the node is let go.
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
	/* Is it what sysfs makes of directories today? */
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

/* A directory in @parent, referenced, or NULL. */
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
	pr_notice("no /sys/kernel/mm/" DIRECTORY ", software that looks there alone does not find this module: %s\n",
		  why);
}

/*
 * Before the first client is registered with ib_core: is there a client @name
 * already? To be undone by peermem_memory_peers_hide().
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

/* Does somebody else show the clients, or occupy their place? */
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

	/* An ib_core with the directory would have refused a second one. */
	if (all && was_there)
		pr_notice("/sys/kernel/mm/" DIRECTORY "/%s is not this module's: it was there before\n",
			  peers[0].name);
	else if (!all)
		not_shown("it is somebody else's, who does not show this module's clients");
	return true;
}

static bool show(const struct peermem_peer *peer, unsigned int i)
{
	shown[i].stats = peer->stats;
	shown[i].kobj = kobject_create_and_add(peer->name, directory);
	return shown[i].kobj && !sysfs_create_group(shown[i].kobj, &group);
}

static void remove(struct kobject *kobj)
{
	if (!kobj)
		return;
	/* Not left to the last reference: it need not be ours. */
	kobject_del(kobj);
	kobject_put(kobj);
}

static void remove_all(void)
{
	int i;

	/* Who reads a file of one looks at those before it: counter_show(). */
	for (i = PEERMEM_PEERS - 1; i >= 0; i--) {
		remove(shown[i].kobj);
		shown[i].kobj = NULL;
		shown[i].stats = NULL;
	}
	remove(directory);
	directory = NULL;
}

/*
 * When all @count clients are registered, at most PEERMEM_PEERS. Their numbers
 * are read until peermem_memory_peers_hide().
 */
void peermem_memory_peers_show(const struct peermem_peer *peers,
			       unsigned int count)
{
	unsigned int i;

	if (!memory_peers)
		return;
	if (!mm) {
		not_shown("/sys/kernel/mm is not where it was looked for");
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
		not_shown("it could not be made");
	}
}

/* Before the clients are unregistered, and in place of showing them. */
void peermem_memory_peers_hide(void)
{
	remove_all();
	mm_put();
}

#else

/* Nothing is looked for, and nothing shown. */

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

// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Compiles the module's memory_peers.c, which runs on the kernel's real sysfs.
 * The tests create the directory memory_peers in /sys/peermem_kunit, so that
 * they do not disturb the users of /sys/kernel.
 */

#include <linux/kernfs.h>
#include <linux/kobject.h>
#include <linux/kref.h>
#include <linux/string.h>
#include <linux/sysfs.h>

#include "../src/compat.h"
#include "fakes.h"

static struct kobject *fake_kernel_kobj;

static struct kobject *add(const char *name, struct kobject *parent)
{
	struct kobject *kobj;

	if (fake_kobject_fails())
		return NULL;
	kobj = kobject_create_and_add(name, parent);
	if (kobj && !strcmp(name, "memory_peers"))
		fake_directory(true);
	return kobj;
}

static void del(struct kobject *kobj);

static int create_group(struct kobject *kobj, const struct attribute_group *grp)
{
	return fake_group_fails() ? -ENOMEM : sysfs_create_group(kobj, grp);
}

/* memory_peers.c defines its own pr_fmt(). */
#undef pr_fmt
#define kernel_kobj fake_kernel_kobj
#define kobject_create_and_add add
#define kobject_del del
#define sysfs_create_group create_group

#include "../src/memory_peers.c"

#undef kobject_create_and_add
#undef kobject_del
#undef sysfs_create_group

static void del(struct kobject *kobj)
{
	bool directory = !strcmp(kobject_name(kobj), "memory_peers");
	int i;

	kobject_del(kobj);
	/* A reader of the next client's file accesses this client, too. */
	for (i = 0; i < PEERMEM_PEERS - 1; i++)
		if (shown[i].kobj == kobj && shown[i + 1].kobj)
			fake_test_fails(__FILE__, __LINE__,
					"a client is removed before a later client");
	if (directory)
		fake_directory(false);
}

static struct kobject *fake_mm;
/* Another module's memory_peers, and a client in it. */
static struct kobject *others;
static struct kobject *other;

static void free_kobj(struct kobject **kobj)
{
	if (*kobj)
		kobject_del(*kobj);
	kobject_put(*kobj);
	*kobj = NULL;
}

int fake_sysfs_new(void)
{
	fake_kernel_kobj = kobject_create_and_add("peermem_kunit", NULL);
	if (fake_kernel_kobj)
		fake_mm = kobject_create_and_add("mm", fake_kernel_kobj);
	if (fake_mm)
		return 0;
	fake_sysfs_free();
	return -ENOMEM;
}

void fake_sysfs_free(void)
{
	free_kobj(&other);
	free_kobj(&others);
	free_kobj(&fake_mm);
	free_kobj(&fake_kernel_kobj);
}

void fake_sysfs_without_mm(void)
{
	free_kobj(&fake_mm);
}

void fake_sysfs_occupy(const char *client)
{
	if (!others)
		others = kobject_create_and_add("memory_peers", fake_mm);
	if (others && client && !other)
		other = kobject_create_and_add(client, others);
}

/*
 * Returns the number of references to fake_mm. Does not count the reference of
 * this file, nor that of another module's memory_peers.
 */
int fake_sysfs_refs(void)
{
	return fake_mm ? kref_read(&fake_mm->kref) - 1 - !!others : 0;
}

static struct kernfs_node *step(struct kernfs_node *from, const char *name)
{
	struct kernfs_node *to;

	if (!from || !name)
		return from;
	to = kernfs_find_and_get(from, name);
	kernfs_put(from);
	return to;
}

/*
 * Returns the sysfs node memory_peers/@client/@file with a reference. Skips a
 * name that is NULL.
 */
static struct kernfs_node *walk(const char *client, const char *file)
{
	kernfs_get(fake_mm->sd);
	return step(step(step(fake_mm->sd, "memory_peers"), client), file);
}

bool fake_sysfs_has(const char *client, const char *file)
{
	struct kernfs_node *node = walk(client, file);

	kernfs_put(node);
	return node;
}

/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * Interfaces of Linux 7.3 that the test code uses, for older kernels down to
 * 5.10.
 *
 * Only test code includes this header. The module itself probes for each
 * function, because distributions backport functions. A helper has the kernel's
 * own name if the kernel lacks that name, and a name that begins with test_ if
 * the kernel has the function with other arguments.
 */
#ifndef _LINUX_TEST_COMPAT_H
#define _LINUX_TEST_COMPAT_H

#include <linux/debugfs.h>
#include <linux/fs.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/rbtree.h>
#include <linux/sched/mm.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/version.h>

#if KERNEL_VERSION(6, 12, 0) <= LINUX_VERSION_CODE
#include <linux/unaligned.h>
#else
#include <asm/unaligned.h>
#endif

#ifndef kzalloc_obj
#define kzalloc_obj(obj)	kzalloc(sizeof(obj), GFP_KERNEL)
#endif

#ifndef kvmalloc_objs
#define kvmalloc_objs(obj, n)	kvmalloc_array(n, sizeof(obj), GFP_KERNEL)
#define kvzalloc_objs(obj, n)	kvcalloc(n, sizeof(obj), GFP_KERNEL)
#endif

#ifndef SLAB_NO_MERGE
#define SLAB_NO_MERGE		0
#endif

#ifndef DEFINE_SHOW_STORE_ATTRIBUTE
#define DEFINE_SHOW_STORE_ATTRIBUTE(_name)				\
static int _name##_open(struct inode *inode, struct file *file)		\
{									\
	return single_open(file, _name##_show, inode->i_private);	\
}									\
									\
static const struct file_operations _name##_fops = {			\
	.owner		= THIS_MODULE,					\
	.open		= _name##_open,					\
	.read		= seq_read,					\
	.write		= _name##_write,				\
	.llseek		= seq_lseek,					\
	.release	= single_release,				\
}
#endif

#if KERNEL_VERSION(6, 3, 0) > LINUX_VERSION_CODE
static inline void vm_flags_set(struct vm_area_struct *vma, unsigned long flags)
{
	vma->vm_flags |= flags;
}

static inline void vm_flags_clear(struct vm_area_struct *vma,
				  unsigned long flags)
{
	vma->vm_flags &= ~flags;
}
#endif

#if KERNEL_VERSION(5, 12, 0) > LINUX_VERSION_CODE
static inline void rb_add(struct rb_node *node, struct rb_root *tree,
			  bool (*less)(struct rb_node *,
				       const struct rb_node *))
{
	struct rb_node **link = &tree->rb_node;
	struct rb_node *parent = NULL;

	while (*link) {
		parent = *link;
		if (less(node, parent))
			link = &parent->rb_left;
		else
			link = &parent->rb_right;
	}
	rb_link_node(node, parent, link);
	rb_insert_color(node, tree);
}
#endif

#if KERNEL_VERSION(5, 14, 0) > LINUX_VERSION_CODE
static inline struct vm_area_struct *vma_lookup(struct mm_struct *mm,
						unsigned long addr)
{
	struct vm_area_struct *vma = find_vma(mm, addr);

	return vma && addr >= vma->vm_start ? vma : NULL;
}
#endif

#if KERNEL_VERSION(6, 0, 0) > LINUX_VERSION_CODE
#define MEMORY_DEVICE_COHERENT	(MEMORY_DEVICE_PCI_P2PDMA + 1)
#endif

#if KERNEL_VERSION(6, 15, 0) > LINUX_VERSION_CODE
static inline struct dev_pagemap *page_pgmap(const struct page *page)
{
	return page->pgmap;
}
#endif

/* Finds room for @len bytes in the address space of the calling process. */
static inline unsigned long
test_get_unmapped_area(struct file *file, unsigned long addr,
		       unsigned long len, unsigned long pgoff,
		       unsigned long flags)
{
#if KERNEL_VERSION(6, 19, 0) <= LINUX_VERSION_CODE
	return mm_get_unmapped_area(file, addr, len, pgoff, flags);
#elif KERNEL_VERSION(6, 10, 0) <= LINUX_VERSION_CODE
	return mm_get_unmapped_area(current->mm, file, addr, len, pgoff, flags);
#else
	return current->mm->get_unmapped_area(file, addr, len, pgoff, flags);
#endif
}

/* Renames the file or directory @dentry within its directory. */
static inline void test_debugfs_rename(struct dentry *dentry, const char *name)
{
#if KERNEL_VERSION(6, 15, 0) <= LINUX_VERSION_CODE
	debugfs_change_name(dentry, "%s", name);
#else
	if (!IS_ERR_OR_NULL(dentry))
		debugfs_rename(dentry->d_parent, dentry, dentry->d_parent,
			       name);
#endif
}

#endif /* _LINUX_TEST_COMPAT_H */

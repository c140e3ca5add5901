/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * What the test code uses of Linux 7.3, for older kernels down to 5.10.
 *
 * Test code alone includes this header: the module itself probes for each
 * function, since distributions carry functions back. A helper here stands
 * under the kernel's own name where the kernel lacks that name, and under a
 * name that begins with test_ where the kernel has it with other arguments.
 */
#ifndef _LINUX_TEST_COMPAT_H
#define _LINUX_TEST_COMPAT_H

#include <linux/debugfs.h>
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/sched/mm.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/version.h>

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

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 3, 0)
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

#if LINUX_VERSION_CODE < KERNEL_VERSION(5, 14, 0)
static inline struct vm_area_struct *vma_lookup(struct mm_struct *mm,
						unsigned long addr)
{
	struct vm_area_struct *vma = find_vma(mm, addr);

	return vma && addr >= vma->vm_start ? vma : NULL;
}
#endif

/* Gives the file or directory @dentry another name in its directory. */
static inline void test_debugfs_rename(struct dentry *dentry, const char *name)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 15, 0)
	debugfs_change_name(dentry, "%s", name);
#else
	if (!IS_ERR_OR_NULL(dentry))
		debugfs_rename(dentry->d_parent, dentry, dentry->d_parent,
			       name);
#endif
}

#endif /* _LINUX_TEST_COMPAT_H */

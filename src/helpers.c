// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * The kernel services behind the Rust code. Rust code does not access
 * structures whose layout differs between kernels, and cannot call macros and
 * inline functions. This file accesses such structures, and calls such macros
 * and functions.
 */

#include <linux/capability.h>
#include <linux/cred.h>
#include <linux/debugfs.h>
#include <linux/dma-mapping.h>
#include <linux/file.h>
#include <linux/kobject.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/ptrace.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/sched/task_stack.h>
#include <linux/seq_file.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include <asm/syscall.h>

#include "compat.h"
#include "helpers.h"

/*
 * Statically initialized locks. Rust code can initialize a lock only at run
 * time. sync.rs wraps all of these locks.
 */
DEFINE_SPINLOCK(peermem_registry_lock);
DEFINE_SPINLOCK(peermem_history_lock);
DEFINE_MUTEX(peermem_quota_lock);
DEFINE_MUTEX(peermem_callbacks_lock);
/*
 * dma_map takes this lock under ib_core's mapping_lock. Locks of the PCI core
 * are taken under this lock.
 */
DEFINE_MUTEX(peermem_bars_lock);
DECLARE_RWSEM(peermem_put_rwsem);

bool peermem_is_killed(void)
{
	return fatal_signal_pending(current);
}

/*
 * Returns true once the thread is in do_exit(). The thread may have closed
 * descriptors by then.
 */
bool peermem_is_exiting(void)
{
	return current->flags & PF_EXITING;
}

/* Returns the real user ID of the process, in the initial user namespace. */
unsigned int peermem_user(void)
{
	return __kuid_val(current_uid());
}

/* Returns the calling thread as a key for comparison. */
const void *peermem_current(void)
{
	return current;
}

/* Returns the process ID in the initial PID namespace. */
pid_t peermem_process(void)
{
	return current->tgid;
}

/*
 * Writes the IDs of the calling process and thread, and the TASK_COMM_LEN bytes
 * of the thread's name. If another thread changes the name at the same time,
 * @comm is a mix of both names.
 */
void peermem_thread(pid_t *tgid, pid_t *pid, char *comm)
{
	*tgid = current->tgid;
	*pid = current->pid;
	memcpy(comm, current->comm, TASK_COMM_LEN);
}

/* Returns the monotonic time in microseconds. */
u64 peermem_microseconds(void)
{
	return compat_microseconds();
}

/*
 * Returns false in kernel threads, io_uring workers and exiting threads, which
 * do not return from a system call of their own.
 */
bool peermem_returns_to_user(void)
{
	return !(current->flags & (PF_KTHREAD | PF_IO_WORKER | PF_EXITING));
}

static int peermem_settle(struct inode *inode, struct file *file)
{
	struct peermem_settlement *settlement = file->private_data;

	settlement->settle(settlement, peermem_returns_to_user() &&
			   !syscall_get_error(current, current_pt_regs()));
	return 0;
}

static const struct file_operations peermem_settle_fops = {
	.owner		= THIS_MODULE,
	.release	= peermem_settle,
};

/*
 * Calls @settlement->settle() when the calling thread returns from its system
 * call, since fput() is deferred until then. If the thread exits first, a
 * kernel thread calls settle(). The file keeps this module loaded until
 * settle() has returned. Returns false, and never calls settle(), if no file
 * can be made. May sleep.
 */
bool peermem_at_return(struct peermem_settlement *settlement)
{
	struct file *file = compat_anon_file("[nvidia_peermem]",
					     &peermem_settle_fops, settlement);

	if (IS_ERR(file))
		return false;
	fput(file);
	return true;
}

/*
 * Returns the kind of mapping at @addr in the calling process. Does not wait
 * for the mmap lock: ib_core's mutex for the whole machine is held here, and a
 * process can keep its own mmap lock for a long time.
 */
enum peermem_vma peermem_vma(u64 addr)
{
	struct mm_struct *mm = current->mm;
	enum peermem_vma kind = PEERMEM_VMA_UNKNOWN;
	struct vm_area_struct *vma;

	if (!compat_access_ok(addr))
		return PEERMEM_VMA_INVALID;
	if (!mm || !compat_mmap_trylock(mm))
		return kind;
	vma = find_vma(mm, addr);
	if (!vma || addr < vma->vm_start)
		kind = PEERMEM_VMA_NONE;
	else if (vma->vm_flags & VM_ACCESS_FLAGS &&
		 !(vma->vm_flags & (VM_IO | VM_PFNMAP | VM_MIXEDMAP)))
		kind = PEERMEM_VMA_HOST;
	compat_mmap_unlock(mm);
	return kind;
}

/* Returns false if peermem_module_find() cannot find any module. */
bool peermem_finds_modules(void)
{
#ifdef PEERMEM_HAS_KSET_FIND_OBJ
	return true;
#else
	return false;
#endif
}

/*
 * Looks for the loaded module @name, and writes its version if the module is
 * live. The reference to the kobject keeps the module's memory, since the
 * unloading of a module waits for that reference. The version is freed earlier,
 * so reading it needs a reference to the module.
 */
bool peermem_module_find(const char *name, char *version, size_t room,
			 bool *proprietary)
{
	struct kobject *kobj;
	struct module *mod;
	bool found = false;

	*version = 0;
	*proprietary = false;
	kobj = kset_find_obj(THIS_MODULE->mkobj.kobj.kset, name);
	if (!kobj)
		return false;
	mod = container_of(kobj, struct module_kobject, kobj)->mod;
	if (!mod) {
		/*
		 * A built-in module, for example one with parameters, has a
		 * kobject here but no struct module.
		 */
		found = true;
	} else if (try_module_get(mod)) {
		found = true;
		*proprietary = test_bit(TAINT_PROPRIETARY_MODULE, &mod->taints);
		if (READ_ONCE(mod->state) == MODULE_STATE_LIVE && mod->version)
			strscpy(version, mod->version, room);
		module_put(mod);
	}
	kobject_put(kobj);
	return found;
}

/* Called between the steps of long work. */
void peermem_cond_resched(void)
{
	cond_resched();
}

unsigned int peermem_max_segment(struct pci_dev *pdev)
{
	return dma_get_max_seg_size(&pdev->dev);
}

/* Returns @dev as a PCI device, or NULL. Takes no reference. */
struct pci_dev *peermem_pci_dev(struct device *dev)
{
	return dev && dev_is_pci(dev) ? to_pci_dev(dev) : NULL;
}

/* Returns false once the device has been removed. */
bool peermem_pci_is_there(struct pci_dev *pdev)
{
	return pdev->dev.kobj.state_in_sysfs;
}

/*
 * Finds the memory BAR of @pdev that contains @addr. A removed device has no
 * BARs. BARs change only with the machine's configuration. The result is used
 * only for addresses that nvidia.ko reported as memory.
 */
bool peermem_pci_bar(struct pci_dev *pdev, u64 addr, u64 *start, u64 *len)
{
	int i;

	for (i = 0; i < PCI_STD_NUM_BARS; i++) {
		struct resource *bar = &pdev->resource[i];
		u64 first = READ_ONCE(bar->start);
		u64 last = READ_ONCE(bar->end);

		if (addr < first || addr > last)
			continue;
		if (!(READ_ONCE(bar->flags) & IORESOURCE_MEM) ||
		    !READ_ONCE(bar->parent))
			continue;
		*start = first;
		*len = last - first + 1;
		return true;
	}
	return false;
}

/* Returns the PCI address as one number: see PciAddress in device.rs. */
u64 peermem_pci_address(struct pci_dev *pdev)
{
	return (u64)(u32)pci_domain_nr(pdev->bus) << 16 |
	       PCI_DEVID(pdev->bus->number, pdev->devfn);
}

/*
 * Returns true if any page of @len bytes from @addr on has a struct page and is
 * not peer-to-peer DMA memory of the BAR between @first and @last. A BAR has
 * struct pages only if a driver made them, in units of a memory subsection (2
 * MiB). On hosts that are set up for GPUDirect Storage, nvidia-uvm turns the
 * whole BAR into peer-to-peer DMA memory. If it is not known whether a page has
 * a struct page, @unknown is used.
 */
bool peermem_has_struct_page(u64 addr, u64 len, u64 first, u64 last,
			     bool unknown)
{
	u64 end = addr + len - 1;

	do {
		unsigned long pfn = PHYS_PFN(addr);

		if (compat_has_page(pfn, unknown) &&
		    !compat_is_p2pdma(pfn, first, last))
			return true;
		/* The sum is 0 after the highest address. */
		addr = round_down(addr, SZ_2M) + SZ_2M;
	} while (addr && addr <= end);
	return false;
}

int peermem_bar_map(struct pci_dev *pdev, u64 addr, size_t len, u64 *dma)
{
	dma_addr_t mapped = compat_map_bar(&pdev->dev, addr, len,
					   COMPAT_BAR_ATTRS);

	if (dma_mapping_error(&pdev->dev, mapped))
		return -EIO;
	*dma = mapped;
	return 0;
}

void peermem_bar_unmap(struct pci_dev *pdev, u64 dma, size_t len)
{
	compat_unmap_bar(&pdev->dev, dma, len, COMPAT_BAR_ATTRS);
}

/*
 * Returns true if nothing translates the addresses of @pdev. A mapping then
 * gives the device no access that it did not have before. Returns false if the
 * translation is not known.
 */
bool peermem_is_direct(struct pci_dev *pdev)
{
	struct device *dev = &pdev->dev;

	return !get_dma_ops(dev) && !compat_has_dma_offset(dev) &&
	       !compat_iommu_translates(dev, true);
}

/*
 * Returns true if an IOMMU translates the DMA addresses of @pdev. Returns false
 * if the translation is not known.
 */
bool peermem_is_translated(struct pci_dev *pdev)
{
	struct device *dev = &pdev->dev;

	return !get_dma_ops(dev) && compat_iommu_translates(dev, false);
}

/*
 * The DMA API rounds to whole pages of the IOMMU. Returns true if the DMA API
 * maps exactly the requested bytes. @bits is the bitwise OR of all addresses
 * and lengths.
 */
bool peermem_maps_exactly(struct pci_dev *pdev, u64 bits)
{
	return !(bits & (compat_dma_granule(&pdev->dev) - 1));
}

/* The physical address 0 makes linked memory begin at an IOMMU page. */
bool peermem_iova_alloc(struct pci_dev *pdev, struct dma_iova_state *state,
			size_t size)
{
	return dma_iova_try_alloc(&pdev->dev, state, 0, size);
}

int peermem_iova_link(struct pci_dev *pdev, struct dma_iova_state *state,
		      u64 addr, size_t offset, size_t len)
{
	return dma_iova_link(&pdev->dev, state, addr, offset, len,
			     DMA_BIDIRECTIONAL, DMA_ATTR_MMIO);
}

int peermem_iova_sync(struct pci_dev *pdev, struct dma_iova_state *state,
		      size_t offset, size_t len)
{
	return dma_iova_sync(&pdev->dev, state, offset, len);
}

/*
 * dma_iova_destroy() cannot replace this function and the next one, because it
 * requires linked memory from the start of the range on.
 */
void peermem_iova_unlink(struct pci_dev *pdev, struct dma_iova_state *state,
			 size_t offset, size_t len)
{
	dma_iova_unlink(&pdev->dev, state, offset, len, DMA_BIDIRECTIONAL,
			DMA_ATTR_MMIO);
}

void peermem_iova_free(struct pci_dev *pdev, struct dma_iova_state *state)
{
	dma_iova_free(&pdev->dev, state);
}

/* An open file: its callbacks, and the reader that Rust code made. */
struct peermem_open_file {
	const struct peermem_file_ops *ops;
	void *reader;
};

/* The position in a file is the number of a record. */
static void *peermem_seq_find(struct peermem_open_file *open, loff_t *pos)
{
	u64 number = *pos;

	if (!open->ops->find(open->reader, &number))
		return NULL;
	*pos = number;
	return open;
}

static void *peermem_seq_start(struct seq_file *seq, loff_t *pos)
{
	return peermem_seq_find(seq->private, pos);
}

static void *peermem_seq_next(struct seq_file *seq, void *at, loff_t *pos)
{
	++*pos;
	return peermem_seq_find(at, pos);
}

static void peermem_seq_stop(struct seq_file *seq, void *at)
{
}

static int peermem_seq_show(struct seq_file *seq, void *at)
{
	struct peermem_open_file *open = at;

	open->ops->show(seq, open->reader);
	return 0;
}

static const struct seq_operations peermem_seq_ops = {
	.start	= peermem_seq_start,
	.next	= peermem_seq_next,
	.stop	= peermem_seq_stop,
	.show	= peermem_seq_show,
};

static int peermem_open(struct inode *inode, struct file *file,
			const struct peermem_file_ops *ops)
{
	struct peermem_open_file *open;
	int ret;

	open = __seq_open_private(file, &peermem_seq_ops, sizeof(*open));
	if (!open)
		return -ENOMEM;
	open->ops = ops;
	ret = ops->open(&open->reader);
	if (ret)
		seq_release_private(inode, file);
	return ret;
}

static int peermem_release(struct inode *inode, struct file *file)
{
	struct seq_file *seq = file->private_data;
	struct peermem_open_file *open = seq->private;

	open->ops->release(open->reader);
	return seq_release_private(inode, file);
}

#ifdef PEERMEM_HAS_DEBUGFS

static int peermem_debugfs_open(struct inode *inode, struct file *file)
{
	return peermem_open(inode, file, inode->i_private);
}

/* The owner keeps the module loaded while a file is open. */
static const struct file_operations peermem_fops = {
	.owner		= THIS_MODULE,
	.open		= peermem_debugfs_open,
	.read		= seq_read,
	.llseek		= seq_lseek,
	.release	= peermem_release,
};

/* If debugfs is off at boot (debugfs=off), the next functions do nothing. */

struct peermem_folder *peermem_folder_add(void)
{
	return (void *)debugfs_create_dir("nvidia_peermem", NULL);
}

void peermem_folder_add_file(struct peermem_folder *folder, const char *name,
			     umode_t mode, const struct peermem_file_ops *ops)
{
	debugfs_create_file(name, mode, (struct dentry *)folder, (void *)ops,
			    &peermem_fops);
}

void peermem_folder_remove(struct peermem_folder *folder)
{
	debugfs_remove((struct dentry *)folder);
}

#else

/*
 * Every container has a /proc, and a container's root passes the check of the
 * file's mode there, too. Opening therefore requires a capability in the
 * initial user namespace.
 */
static int peermem_proc_open(struct inode *inode, struct file *file)
{
	if (!capable(CAP_SYS_ADMIN))
		return -EPERM;
	return peermem_open(inode, file, compat_proc_data(inode));
}

/*
 * An open file does not keep the module loaded. After proc_remove() has
 * returned, procfs no longer calls the module for an open file. proc_remove()
 * first blocks new calls, and waits for running ones (proc_entry_rundown()).
 * Then it calls proc_release for each open file (close_pdeo()), and a later
 * close() does not call proc_release again. A later read() returns -EIO. The
 * file_operations of the file belong to procfs, not to the module.
 */
static const struct proc_ops peermem_proc_ops = {
	.proc_open	= peermem_proc_open,
	.proc_read	= seq_read,
	.proc_lseek	= seq_lseek,
	.proc_release	= peermem_release,
};

/*
 * Without procfs, the next functions do nothing. The kernel makes /proc/driver
 * at boot.
 */

struct peermem_folder *peermem_folder_add(void)
{
	return (void *)proc_mkdir("driver/nvidia-peermem", NULL);
}

void peermem_folder_add_file(struct peermem_folder *folder, const char *name,
			     umode_t mode, const struct peermem_file_ops *ops)
{
	/* NULL stands for the root of /proc. */
	if (folder)
		proc_create_data(name, 0400, (struct proc_dir_entry *)folder,
				 &peermem_proc_ops, (void *)ops);
}

void peermem_folder_remove(struct peermem_folder *folder)
{
	proc_remove((struct proc_dir_entry *)folder);
}

#endif

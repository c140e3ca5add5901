// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * GPU memory of a process. mmap() of /dev/nvidia<N> allocates the memory, and
 * page faults map it for the CPU. munmap() of the last piece, the end
 * of the process, or an ioctl frees the memory.
 *
 * The mapping has no struct pages, so get_user_pages() refuses it. Like a CUDA
 * context, the mapping is not inherited by a child. madvise() or mprotect() may
 * split the mapping into pieces, which are still one allocation.
 */
#include <linux/file.h>
#include <linux/mm.h>
#include <linux/mman.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include "nvidia.h"


/*
 * Threads that can free memory, and run the callbacks, after munmap and exit.
 */
static const char * const context_names[] = { "caller", "kthread" };
static int free_context;

static int free_context_set(const char *val, const struct kernel_param *kp)
{
	int ret = sysfs_match_string(context_names, val);

	if (ret < 0)
		return ret;
	free_context = ret;
	return 0;
}

static int free_context_get(char *buf, const struct kernel_param *kp)
{
	return sysfs_emit(buf, "%s\n", context_names[free_context]);
}

static const struct kernel_param_ops free_context_ops = {
	.set = free_context_set,
	.get = free_context_get,
};

module_param_cb(free_context, &free_context_ops, NULL, 0644);
MODULE_PARM_DESC(free_context, "thread that frees memory after munmap and exit: caller or kthread");

/* Held for writing while memory is freed or moved, to exclude faults. */
DECLARE_RWSEM(place_sem);

/*
 * Protects the lists of allocations and clients, and the bitmaps and counters
 * of a BAR.
 */
DEFINE_MUTEX(mem_lock);

/* Registered allocations. Protected by mem_lock. */
static LIST_HEAD(allocs);

/*
 * A process that has opened a GPU is a client of its driver. A process may give
 * other clients access to its memory on that GPU. The list of processes with
 * access is short, like the real driver's. A process leaves the list when its
 * client is freed, even if the process still has pins.
 */
#define MAX_LISTED	256

struct client {
	struct list_head node;
	struct gpu *gpu;
	pid_t tgid;
};

struct guest {
	struct list_head node;
	struct client *client;
	pid_t host;
};

/* Protected by mem_lock. */
static LIST_HEAD(clients);
static LIST_HEAD(guests);

static struct workqueue_struct *free_wq;

/*
 * Offset of the next allocation in the file's mapping, so that each allocation
 * has its own range. Protected by mem_lock.
 */
static loff_t next_offset;

static void alloc_release(struct kref *kref)
{
	struct alloc *alloc = container_of(kref, struct alloc, kref);

	fput(alloc->file);
	kfree(alloc);
}

static void alloc_put(struct alloc *alloc)
{
	kref_put(&alloc->kref, alloc_release);
}

/*
 * Imitates a GPU that has fallen off the bus. The resource manager frees the
 * memory without callbacks. On a real GPU, these callbacks never run. Here they
 * run when the parameter is set to N again, because the VM could not shut down
 * without them.
 */
static bool gpu_lost;

/*
 * Allocations that were freed while gpu_lost was Y. Protected by the API lock.
 */
static LIST_HEAD(uncalled);

static int gpu_lost_set(const char *val, const struct kernel_param *kp)
{
	struct alloc *alloc, *next;
	int ret = param_set_bool(val, kp);

	if (ret || gpu_lost)
		return ret;
	ret = api_lock();
	if (ret)
		return ret;
	list_for_each_entry_safe(alloc, next, &uncalled, node) {
		p2p_revoke(alloc);
		vidmem_put(alloc->vidmem);
		list_del(&alloc->node);
		alloc_put(alloc);
	}
	api_unlock();
	return 0;
}

static const struct kernel_param_ops gpu_lost_ops = {
	.flags = KERNEL_PARAM_OPS_FL_NOARG,
	.set = gpu_lost_set,
	.get = param_get_bool,
};

module_param_cb(gpu_lost, &gpu_lost_ops, &gpu_lost, 0644);
MODULE_PARM_DESC(gpu_lost, "Y: memory is freed without callbacks; N: the missing callbacks are made");

/*
 * Ends an allocation. A second thread that ends the same allocation waits until
 * the first thread has ended it.
 */
static void alloc_free(struct alloc *alloc)
{
	struct vidmem *mem;
	bool lost;

	/* This cannot fail, because no callback calls this function. */
	if (WARN_ON(api_lock()))
		return;
	if (!alloc->registered) {
		api_unlock();
		return;
	}

	lost = READ_ONCE(gpu_lost);
	if (!lost)
		p2p_revoke(alloc);

	mutex_lock(&mem_lock);
	list_del(&alloc->node);
	alloc->registered = false;
	mem = alloc->vidmem;
	mutex_unlock(&mem_lock);

	/* Stop faults from adding mappings, then remove the CPU's mappings. */
	down_write(&place_sem);
	alloc->gone = true;
	mem->mapping = NULL;
	up_write(&place_sem);
	unmap_mapping_range(alloc->file->f_mapping, alloc->offset,
			    alloc->length, 1);

	uncount(ALLOCS_LIVE);
	if (lost) {
		/* The memory has no owner now, so no put finds its pins. */
		alloc->tgid = 0;
		list_add_tail(&alloc->node, &uncalled);
	} else {
		vidmem_put(mem);
	}
	api_unlock();

	if (!lost)
		alloc_put(alloc);
}

static void alloc_free_work(struct work_struct *work)
{
	struct alloc *alloc = container_of(work, struct alloc, work);

	alloc_free(alloc);
	alloc_put(alloc);
}

static void alloc_free_in(struct alloc *alloc, bool kthread)
{
	if (!kthread) {
		alloc_free(alloc);
		return;
	}

	kref_get(&alloc->kref);
	if (!queue_work(free_wq, &alloc->work))
		alloc_put(alloc);
	flush_work(&alloc->work);
}

/*
 * Returns the allocation of a process at an address, or NULL. The caller holds
 * mem_lock. The allocation stays registered while the caller holds mem_lock or
 * the API lock.
 */
struct alloc *memory_find(pid_t tgid, u64 va)
{
	struct alloc *alloc;

	lockdep_assert_held(&mem_lock);

	list_for_each_entry(alloc, &allocs, node)
		if (alloc->tgid == tgid && va >= alloc->va &&
		    va - alloc->va < alloc->length)
			return alloc;
	return NULL;
}

/*
 * Returns true for the owner of an allocation, and for processes that the owner
 * has admitted. The caller holds mem_lock.
 */
bool memory_lists(const struct alloc *alloc, pid_t tgid)
{
	struct guest *guest;

	lockdep_assert_held(&mem_lock);

	if (alloc->tgid == tgid)
		return true;
	list_for_each_entry(guest, &guests, node)
		if (guest->client->tgid == tgid && guest->host == alloc->tgid &&
		    guest->client->gpu == alloc->gpu)
			return true;
	return false;
}

/*
 * Like memory_find(), but also finds memory to which its owner has admitted the
 * process.
 */
struct alloc *memory_find_listed(pid_t tgid, u64 va)
{
	struct alloc *alloc = memory_find(tgid, va);

	if (alloc || list_empty(&guests))
		return alloc;
	list_for_each_entry(alloc, &allocs, node)
		if (va >= alloc->va && va - alloc->va < alloc->length &&
		    memory_lists(alloc, tgid))
			return alloc;
	return NULL;
}

static struct alloc *first_of(struct gpu *gpu)
{
	struct alloc *alloc;

	guard(mutex)(&mem_lock);
	list_for_each_entry(alloc, &allocs, node) {
		if (alloc->gpu == gpu) {
			kref_get(&alloc->kref);
			return alloc;
		}
	}
	return NULL;
}

/* Frees all memory of a GPU with gpu->removing set. */
void memory_free_all(struct gpu *gpu)
{
	struct alloc *alloc;

	while ((alloc = first_of(gpu))) {
		alloc_free(alloc);
		alloc_put(alloc);
	}
}

/* The mapping */

static void memory_open(struct vm_area_struct *vma)
{
	struct alloc *alloc = vma->vm_private_data;

	kref_get(&alloc->kref);
	atomic_inc(&alloc->vmas);
}

static void memory_close(struct vm_area_struct *vma)
{
	struct alloc *alloc = vma->vm_private_data;

	if (atomic_dec_and_test(&alloc->vmas))
		alloc_free_in(alloc, READ_ONCE(free_context));
	alloc_put(alloc);
}

/* Always fails. An allocation keeps its address for life. */
static int memory_mremap(struct vm_area_struct *vma)
{
	return -EINVAL;
}

static vm_fault_t memory_fault(struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;
	struct alloc *alloc = vma->vm_private_data;
	vm_fault_t ret = VM_FAULT_SIGBUS;
	u64 page, va, end;
	phys_addr_t phys;

	down_read(&place_sem);
	if (alloc->gone)
		goto unlock;

	/* Map the part of the 64 KiB page that lies in this VMA. */
	page = (vmf->address - alloc->va) / STANDIN_PAGE_SIZE;
	bar1_touch(alloc->vidmem, page);
	phys = vidmem_phys(alloc->vidmem, page);
	page = alloc->va + page * STANDIN_PAGE_SIZE;
	end = min(page + STANDIN_PAGE_SIZE, vma->vm_end);
	for (va = max(page, vma->vm_start); va < end; va += PAGE_SIZE) {
		ret = vmf_insert_pfn(vma, va, PHYS_PFN(phys + (va - page)));
		if (ret != VM_FAULT_NOPAGE)
			break;
	}
unlock:
	up_read(&place_sem);
	return ret;
}

static const struct vm_operations_struct memory_vm_ops = {
	.open	= memory_open,
	.close	= memory_close,
	.mremap	= memory_mremap,
	.fault	= memory_fault,
};

static bool overlaps(const struct alloc *new)
{
	const struct alloc *alloc;

	list_for_each_entry(alloc, &allocs, node)
		if (alloc->tgid == new->tgid &&
		    alloc->va < new->va + new->length &&
		    new->va < alloc->va + alloc->length)
			return true;
	return false;
}

static int memory_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct client *client = file->private_data;
	struct gpu *gpu = client->gpu;
	struct alloc *alloc;
	int ret;

	if (!(vma->vm_flags & VM_SHARED) || vma->vm_pgoff ||
	    !IS_ALIGNED(vma->vm_start, STANDIN_GRANULE))
		return -EINVAL;

	alloc = kzalloc_obj(*alloc);
	if (!alloc)
		return -ENOMEM;

	kref_init(&alloc->kref);
	alloc->gpu = gpu;
	alloc->tgid = current->tgid;
	alloc->va = vma->vm_start;
	alloc->length = round_up(vma->vm_end - vma->vm_start, STANDIN_GRANULE);
	alloc->file = get_file(file);
	atomic_set(&alloc->vmas, 1);
	INIT_LIST_HEAD(&alloc->pins);
	INIT_WORK(&alloc->work, alloc_free_work);

	mutex_lock(&mem_lock);
	if (gpu->removing) {
		ret = -ENODEV;
		goto unlock;
	}
	/*
	 * An allocation may still exist here after a part of it was unmapped.
	 */
	if (overlaps(alloc)) {
		ret = -EBUSY;
		goto unlock;
	}
	alloc->vidmem = vidmem_alloc(gpu, alloc->length);
	ret = PTR_ERR_OR_ZERO(alloc->vidmem);
	if (ret)
		goto unlock;

	alloc->offset = next_offset;
	next_offset += alloc->length;
	alloc->vidmem->mapping = file->f_mapping;
	alloc->vidmem->offset = alloc->offset;

	/* One reference for the VMA, and one for the registration. */
	kref_get(&alloc->kref);
	alloc->registered = true;
	list_add_tail(&alloc->node, &allocs);
unlock:
	mutex_unlock(&mem_lock);
	if (ret) {
		alloc_put(alloc);
		return ret;
	}
	count(ALLOCS_LIVE);

	vma->vm_pgoff = alloc->offset >> PAGE_SHIFT;
	vma->vm_page_prot = pgprot_writecombine(vma->vm_page_prot);
	vm_flags_set(vma, VM_IO | VM_PFNMAP | VM_DONTEXPAND | VM_DONTDUMP |
			  VM_DONTCOPY);
	vma->vm_ops = &memory_vm_ops;
	vma->vm_private_data = alloc;
	return 0;
}

static unsigned long memory_get_unmapped_area(struct file *file,
					      unsigned long addr,
					      unsigned long len,
					      unsigned long pgoff,
					      unsigned long flags)
{
	/*
	 * Check the address here, because mmap() unmaps other mappings before
	 * it calls memory_mmap().
	 */
	if (flags & MAP_FIXED)
		return IS_ALIGNED(addr, STANDIN_GRANULE) ? addr : -EINVAL;

	if (len > TASK_SIZE - 2 * STANDIN_GRANULE)
		return -ENOMEM;
	addr = test_get_unmapped_area(file, round_up(addr, STANDIN_GRANULE),
				      round_up(len, STANDIN_GRANULE) + STANDIN_GRANULE,
				      0, flags);
	if (IS_ERR_VALUE(addr))
		return addr;
	return round_up(addr, STANDIN_GRANULE);
}

/* ioctls */

static long memory_ioctl_free(struct gpu *gpu, void __user *argp)
{
	struct standin_free arg;
	struct alloc *alloc;

	if (copy_from_user(&arg, argp, sizeof(arg)))
		return -EFAULT;
	if (arg.flags & ~STANDIN_FREE_KTHREAD || arg.reserved)
		return -EINVAL;

	scoped_guard(mutex, &mem_lock) {
		alloc = memory_find(current->tgid, arg.va);
		if (!alloc || alloc->va != arg.va || alloc->gpu != gpu)
			return -EINVAL;
		kref_get(&alloc->kref);
	}
	alloc_free_in(alloc, arg.flags & STANDIN_FREE_KTHREAD);
	alloc_put(alloc);
	return 0;
}

static int info_of(struct standin_info *arg, struct gpu *gpu)
{
	struct alloc *alloc;
	u32 page, next;

	alloc = memory_find(current->tgid, arg->va);
	if (!alloc || alloc->gpu != gpu)
		return -EINVAL;

	page = (arg->va - alloc->va) / STANDIN_PAGE_SIZE;
	for (next = page + 1; next < alloc->vidmem->pages; next++)
		if (vidmem_phys(alloc->vidmem, next) !=
		    vidmem_phys(alloc->vidmem, next - 1) + STANDIN_PAGE_SIZE)
			break;

	arg->start = alloc->va;
	arg->length = alloc->length;
	arg->phys = vidmem_phys(alloc->vidmem, page) +
		    arg->va % STANDIN_PAGE_SIZE;
	arg->run = alloc->va + (u64)next * STANDIN_PAGE_SIZE - arg->va;
	return 0;
}

static long memory_ioctl_info(struct gpu *gpu, void __user *argp)
{
	struct standin_info arg, out = {};
	int ret = 0;

	if (copy_from_user(&arg, argp, sizeof(arg)))
		return -EFAULT;

	out.va = arg.va;
	out.gpu = gpu->minor;
	out.dma_buf = dmabuf_is_supported();
	out.bar_start = gpu->bar_start;
	out.bar_length = gpu->bar_end - gpu->bar_start + 1;
	memcpy(out.uuid, gpu->uuid, sizeof(out.uuid));
	strscpy(out.pci, gpu->pci, sizeof(out.pci));

	mutex_lock(&mem_lock);
	out.bar_pinned = gpu->pinned * STANDIN_PAGE_SIZE;
	if (out.va)
		ret = info_of(&out, gpu);
	mutex_unlock(&mem_lock);
	if (ret)
		return ret;

	return copy_to_user(argp, &out, sizeof(out)) ? -EFAULT : 0;
}

static long memory_ioctl_admit(struct gpu *gpu, void __user *argp)
{
	struct guest *guest __free(kfree) = kzalloc_obj(*guest);
	struct standin_admit arg;
	struct client *client;
	struct guest *other;
	int listed = 1;

	if (!guest)
		return -ENOMEM;
	if (copy_from_user(&arg, argp, sizeof(arg)))
		return -EFAULT;
	if (arg.reserved)
		return -EINVAL;

	guard(mutex)(&mem_lock);
	list_for_each_entry(other, &guests, node) {
		if (other->host != current->tgid || other->client->gpu != gpu)
			continue;
		if (other->client->tgid == arg.pid)
			return 0;
		listed++;
	}
	if (listed == MAX_LISTED)
		return -EINVAL;
	list_for_each_entry(client, &clients, node) {
		if (client->gpu == gpu && client->tgid == arg.pid) {
			guest->client = client;
			guest->host = current->tgid;
			list_add_tail(&no_free_ptr(guest)->node, &guests);
			return 0;
		}
	}
	return -EINVAL;
}

static long memory_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct client *client = file->private_data;
	struct gpu *gpu = client->gpu;

	switch (cmd) {
	case STANDIN_IOC_FREE:
		return memory_ioctl_free(gpu, (void __user *)arg);
	case STANDIN_IOC_INFO:
		return memory_ioctl_info(gpu, (void __user *)arg);
	case STANDIN_IOC_ADMIT:
		return memory_ioctl_admit(gpu, (void __user *)arg);
	case STANDIN_IOC_EXPORT:
		return dmabuf_ioctl(gpu, (void __user *)arg);
	default:
		return -ENOTTY;
	}
}

static int memory_file_open(struct inode *inode, struct file *file)
{
	struct gpu *gpu = container_of(inode->i_cdev, struct gpu, cdev);
	struct client *client;

	if (READ_ONCE(gpu->removing))
		return -ENODEV;
	client = kzalloc_obj(*client);
	if (!client)
		return -ENOMEM;
	client->gpu = gpu_get(gpu);
	client->tgid = current->tgid;
	file->private_data = client;
	gpu_open(gpu);
	guard(mutex)(&mem_lock);
	list_add_tail(&client->node, &clients);
	return 0;
}

static bool is_listed(const struct client *client)
{
	struct guest *guest;

	list_for_each_entry(guest, &guests, node)
		if (guest->client == client)
			return true;
	return false;
}

static void client_end(struct client *client)
{
	struct guest *guest, *next;
	bool listed;

	mutex_lock(&mem_lock);
	list_del(&client->node);
	listed = is_listed(client);
	mutex_unlock(&mem_lock);

	/* This cannot fail, because no callback calls this function. */
	if (listed && !WARN_ON(api_lock())) {
		mutex_lock(&mem_lock);
		list_for_each_entry_safe(guest, next, &guests, node) {
			if (guest->client != client)
				continue;
			list_del(&guest->node);
			kfree(guest);
		}
		mutex_unlock(&mem_lock);
		api_unlock();
	}
	kfree(client);
}

static int memory_file_release(struct inode *inode, struct file *file)
{
	struct client *client = file->private_data;
	struct gpu *gpu = client->gpu;

	client_end(client);
	gpu_close(gpu);
	gpu_put(gpu);
	return 0;
}

const struct file_operations memory_fops = {
	.owner			= THIS_MODULE,
	.open			= memory_file_open,
	.release		= memory_file_release,
	.mmap			= memory_mmap,
	.get_unmapped_area	= memory_get_unmapped_area,
	.unlocked_ioctl		= memory_ioctl,
	.compat_ioctl		= compat_ptr_ioctl,
	.llseek			= noop_llseek,
};

int memory_init(void)
{
	free_wq = alloc_workqueue("nvidia_close", WQ_UNBOUND, 0);
	return free_wq ? 0 : -ENOMEM;
}

void memory_exit(void)
{
	destroy_workqueue(free_wq);
}

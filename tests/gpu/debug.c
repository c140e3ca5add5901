// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Files in /sys/kernel/debug/nvidia, for tests: counters, failures on request,
 * and hold points (places at which a test stops threads).
 */
#include <linux/atomic.h>
#include <linux/debugfs.h>
#include <linux/export.h>
#include <linux/seq_file.h>
#include <linux/spinlock.h>
#include <linux/timex.h>
#include <linux/uaccess.h>

#include "nvidia.h"

static struct dentry *root;

/* Counters */

static const char * const counter_names[NR_COUNTERS] = {
	[PINS_LIVE]			= "pins_live",
	[PINS_PERSISTENT_LIVE]		= "pins_persistent_live",
	[MAPPINGS_LIVE]			= "mappings_live",
	[DEVICE_REFS]			= "device_refs",
	[BAR_BYTES_PINNED]		= "bar_bytes_pinned",
	[ALLOCS_LIVE]			= "allocs_live",
	[DMABUFS_LIVE]			= "dmabufs_live",
	[DMABUF_MAPS_LIVE]		= "dmabuf_maps_live",
	[GET_PAGES]			= "get_pages",
	[GET_PAGES_OK]			= "get_pages_ok",
	[GET_PAGES_PERSISTENT]		= "get_pages_persistent",
	[GET_PAGES_PERSISTENT_OK]	= "get_pages_persistent_ok",
	[PUT_PAGES]			= "put_pages",
	[PUT_PAGES_FOUND]		= "put_pages_found",
	[PUT_PAGES_FOREIGN]		= "put_pages_foreign",
	[PUT_PAGES_PERSISTENT]		= "put_pages_persistent",
	[DMA_MAP]			= "dma_map",
	[DMA_MAP_OK]			= "dma_map_ok",
	[DMA_UNMAP]			= "dma_unmap",
	[CALLBACKS]			= "callbacks",
	[CALLBACKS_AFTER_PUT]		= "callbacks_after_put",
	[MISUSE]			= "misuse",
	[RECORD_BYTES]			= "record_bytes",
	[DMABUF_EXPORT]			= "dmabuf_export",
};

static atomic64_t counters[NR_COUNTERS];

void count_add(enum counter counter, s64 n)
{
	atomic64_add(n, &counters[counter]);
}

static int counters_show(struct seq_file *m, void *unused)
{
	int i;

	for (i = 0; i < NR_COUNTERS; i++)
		seq_printf(m, "%s %lld\n", counter_names[i],
			   atomic64_read(&counters[i]));
	return 0;
}

static ssize_t counters_write(struct file *file, const char __user *buf,
			      size_t len, loff_t *pos)
{
	int i;

	for (i = FIRST_EVENT_COUNTER; i < NR_COUNTERS; i++)
		atomic64_set(&counters[i], 0);
	return len;
}

DEFINE_SHOW_STORE_ATTRIBUTE(counters);

/* Time of the clients' calls */

struct standin_spent standin_spent;
EXPORT_SYMBOL_GPL(standin_spent);

/*
 * spent_begin() reads the clock last, and spent_end() reads it first. The
 * difference is the time of the call alone.
 */
struct spent spent_begin(enum spent_on on)
{
	struct spent spent = { .on = on };

	atomic_inc(&standin_spent.inside);
	spent.begin = get_cycles();
	return spent;
}

void spent_end(struct spent spent)
{
	u64 end = get_cycles();

	atomic64_add(end - spent.begin, &standin_spent.cycles[spent.on]);
	atomic64_inc(&standin_spent.calls[spent.on]);
	atomic_dec(&standin_spent.inside);
}

/*
 * Failures on request. "N errno" makes the Nth call from now fail, once. "0"
 * disarms the failure. The caller of fail_here() imitates the effects of the
 * failure.
 */
struct fail {
	const char *name;
	unsigned int left;	/* calls until the failure; 0: disarmed */
	int error;		/* negative */
	unsigned int hits;
};

static struct fail fails[NR_FAIL_SITES] = {
	[FAIL_GET_PAGES]		= { "get_pages" },
	[FAIL_GET_PAGES_REGISTER]	= { "get_pages_register" },
	[FAIL_GET_PAGES_PERSISTENT]	= { "get_pages_persistent" },
	[FAIL_DUP_OBJECT]		= { "dup_object" },
	[FAIL_PUT_PAGES]		= { "put_pages" },
	[FAIL_PUT_PAGES_PERSISTENT]	= { "put_pages_persistent" },
	[FAIL_DMA_MAP]			= { "dma_map" },
	[FAIL_DMA_MAP_PAGE]		= { "dma_map_page" },
	[FAIL_DMA_UNMAP]		= { "dma_unmap" },
	[FAIL_FREE_PAGE_TABLE]		= { "free_page_table" },
	[FAIL_FREE_DMA_MAPPING]		= { "free_dma_mapping" },
	[FAIL_DMABUF_EXPORT]		= { "dmabuf_export" },
	[FAIL_DMABUF_MAP]		= { "dmabuf_map" },
};

static DEFINE_SPINLOCK(fails_lock);

/* Returns 0, or the negative errno with which this call must fail. */
int fail_here(enum fail_site site)
{
	struct fail *f = &fails[site];
	int ret = 0;

	/*
	 * If another thread arms the failure during this call, the call may
	 * count or not.
	 */
	if (!READ_ONCE(f->left))
		return 0;

	spin_lock(&fails_lock);
	if (f->left && !--f->left) {
		ret = f->error;
		f->hits++;
	}
	spin_unlock(&fails_lock);

	return ret;
}

static ssize_t fail_read(struct file *file, char __user *buf, size_t len,
			 loff_t *pos)
{
	struct fail *f = file->private_data;
	char text[64];
	int n;

	spin_lock(&fails_lock);
	n = scnprintf(text, sizeof(text), "left=%u errno=%d hits=%u\n",
		      f->left, -f->error, f->hits);
	spin_unlock(&fails_lock);
	return simple_read_from_buffer(buf, len, pos, text, n);
}

static ssize_t fail_write(struct file *file, const char __user *buf,
			  size_t len, loff_t *pos)
{
	struct fail *f = file->private_data;
	unsigned int left;
	int fields, error = EIO;
	char text[32];

	if (len >= sizeof(text))
		return -EINVAL;
	if (copy_from_user(text, buf, len))
		return -EFAULT;
	text[len] = '\0';

	fields = sscanf(text, "%u %d", &left, &error);
	error = abs(error);
	if (fields < 1 || (left && fields < 2) || !error || error > MAX_ERRNO)
		return -EINVAL;

	spin_lock(&fails_lock);
	f->error = -error;
	f->hits = 0;
	WRITE_ONCE(f->left, left);
	spin_unlock(&fails_lock);
	return len;
}

static const struct file_operations fail_fops = {
	.owner	= THIS_MODULE,
	.open	= simple_open,
	.read	= fail_read,
	.write	= fail_write,
	.llseek	= default_llseek,
};

int debug_init(void)
{
	struct dentry *dir;
	int i;

	root = debugfs_create_dir("nvidia", NULL);
	debugfs_create_file("counters", 0600, root, NULL, &counters_fops);

	dir = debugfs_create_dir("fail", root);
	for (i = 0; i < NR_FAIL_SITES; i++)
		debugfs_create_file(fails[i].name, 0600, dir, &fails[i],
				    &fail_fops);

	dir = debugfs_create_dir("hold", root);
	p2p_hold_points(dir);
	return 0;
}

void debug_exit(void)
{
	int i;

	debugfs_remove(root);

	for (i = 0; i < FIRST_EVENT_COUNTER; i++)
		WARN(atomic64_read(&counters[i]), "%s: %lld left\n",
		     counter_names[i], atomic64_read(&counters[i]));
}

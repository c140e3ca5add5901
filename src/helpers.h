/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * Declarations of the C files except memory_peers.c: params.c, trace.c,
 * helpers.c and sg.c. The first lines of each file give the reason for using C.
 */
#ifndef PEERMEM_HELPERS_H
#define PEERMEM_HELPERS_H

#include <linux/dma-mapping.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/rwsem.h>
#include <linux/scatterlist.h>
#include <linux/seq_file.h>
#include <linux/spinlock.h>
#include <linux/types.h>

/*
 * portable/generated.rs has copies of these structures. No compiler plugin may
 * reorder the members of these structures.
 */

/* Incomplete on kernels without dma_iova_try_alloc(). */
struct dma_iova_state;

/* params.c */
struct peermem_params {
	int peerdirect_support;
	int persistent_api_support;
	unsigned int user_limit_mib;
	unsigned int max_chunks;
	bool provider_maps;
} __no_randomize_layout;

extern struct peermem_params peermem_params;
extern const char peermem_version[];

/* trace.c */
void peermem_trace_refused(const char *mode, const char *step,
			   const char *reason, int code, u64 addr, u64 len,
			   pid_t tgid);
bool peermem_trace_is_enabled(void);
void peermem_trace_registered(u64 id, const char *mode, u64 addr, u64 len,
			      u64 page, u64 chunks, pid_t tgid);
void peermem_trace_mapped(u64 id, u32 entries, u64 hca);
void peermem_trace_revoked(u64 id);
void peermem_trace_released(u64 id, const char *state);

/* helpers.c */
extern spinlock_t peermem_registry_lock;
extern spinlock_t peermem_history_lock;
extern struct mutex peermem_quota_lock;
extern struct mutex peermem_callbacks_lock;
extern struct mutex peermem_bars_lock;
extern struct rw_semaphore peermem_put_rwsem;

bool peermem_is_killed(void);
bool peermem_is_exiting(void);
unsigned int peermem_user(void);
const void *peermem_current(void);
pid_t peermem_process(void);
void peermem_thread(pid_t *tgid, pid_t *pid, char *comm);
u64 peermem_microseconds(void);

/* Embedded in a larger structure, as a callback_head is. */
struct peermem_settlement {
	/*
	 * Called once. @succeeded is true if the system call returns no error.
	 */
	void (*settle)(struct peermem_settlement *settlement, bool succeeded);
} __no_randomize_layout;

bool peermem_returns_to_user(void);
bool peermem_at_return(struct peermem_settlement *settlement);

/* The kind of mapping at an address of a process. */
enum peermem_vma {
	/* Device memory, reserved addresses, or unknown. */
	PEERMEM_VMA_UNKNOWN,
	/* CPU memory. */
	PEERMEM_VMA_HOST,
	/* No mapping. */
	PEERMEM_VMA_NONE,
	/* The address is not in user space. */
	PEERMEM_VMA_INVALID,
};

enum peermem_vma peermem_vma(u64 addr);
bool peermem_finds_modules(void);
bool peermem_module_find(const char *name, char *version, size_t room,
			 bool *proprietary);
struct pci_dev *peermem_pci_dev(struct device *dev);
bool peermem_pci_is_there(struct pci_dev *pdev);
bool peermem_pci_bar(struct pci_dev *pdev, u64 addr, u64 *start, u64 *len);
void peermem_cond_resched(void);
unsigned int peermem_max_segment(struct pci_dev *pdev);
u64 peermem_pci_address(struct pci_dev *pdev);
bool peermem_has_struct_page(u64 addr, u64 len, u64 first, u64 last,
			     bool unknown);
int peermem_bar_map(struct pci_dev *pdev, u64 addr, size_t len, u64 *dma);
void peermem_bar_unmap(struct pci_dev *pdev, u64 dma, size_t len);
bool peermem_is_direct(struct pci_dev *pdev);
bool peermem_is_translated(struct pci_dev *pdev);
bool peermem_maps_exactly(struct pci_dev *pdev, u64 bits);
bool peermem_iova_alloc(struct pci_dev *pdev, struct dma_iova_state *state,
			size_t size);
int peermem_iova_link(struct pci_dev *pdev, struct dma_iova_state *state,
		      u64 addr, size_t offset, size_t len);
int peermem_iova_sync(struct pci_dev *pdev, struct dma_iova_state *state,
		      size_t offset, size_t len);
void peermem_iova_unlink(struct pci_dev *pdev, struct dma_iova_state *state,
			 size_t offset, size_t len);
void peermem_iova_free(struct pci_dev *pdev, struct dma_iova_state *state);

/*
 * The callbacks of a file. Rust code produces the contents of the file, and
 * keeps the position of each reader.
 */
struct peermem_file_ops {
	int (*open)(void **reader);
	void (*release)(void *reader);
	/*
	 * Sets @number to the lowest number of a record that is at least
	 * @number. Returns false if there is no such record.
	 */
	bool (*find)(void *reader, u64 *number);
	void (*show)(struct seq_file *seq, void *reader);
} __no_randomize_layout;

/*
 * The module's folder: nvidia_peermem in debugfs or, if debugfs is for GPL
 * modules only, driver/nvidia-peermem in /proc. All files in /proc have mode
 * 0400.
 */
struct peermem_folder;

struct peermem_folder *peermem_folder_add(void);
void peermem_folder_add_file(struct peermem_folder *folder, const char *name,
			     umode_t mode, const struct peermem_file_ops *ops);
void peermem_folder_remove(struct peermem_folder *folder);

/*
 * sg.c: a growing scatter list. Its chunks have the size of a page, and are
 * linked like those of sg_alloc_table(). All members are zero before the first
 * call. sg_free_table() accepts @table at any time afterwards.
 *
 * Rust code fills PEERMEM_SG_CHUNK entries between two calls. PEERMEM_SG_CHUNK
 * is the number of entries in 4 KiB, even if the kernel's pages are larger.
 */
enum { PEERMEM_SG_CHUNK = 128 };

struct peermem_sg {
	struct sg_table table;
	/*
	 * The part of the last chunk that Rust code fills next:
	 * PEERMEM_SG_CHUNK entries.
	 */
	struct scatterlist *chunk;
	/* The last chunk, and the one before it. */
	struct scatterlist *last;
	struct scatterlist *before;
} __no_randomize_layout;

unsigned int peermem_sg_grow(struct peermem_sg *list, struct scatterlist *first,
			     unsigned int filled);
int peermem_sg_finish(struct peermem_sg *list, struct scatterlist *first,
		      unsigned int filled);

#endif /* PEERMEM_HELPERS_H */

// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The files in /proc/driver/nvidia that tools read.
 */
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/utsname.h>

#include "nvidia.h"

static struct proc_dir_entry *proc_root;
static struct proc_dir_entry *proc_gpus;

static int version_show(struct seq_file *m, void *unused)
{
	seq_printf(m, "NVRM version: stand-in GPU, UNIX Open Kernel Module for %s  %s\n",
		   init_utsname()->machine, STANDIN_VERSION);
	return 0;
}

static int information_show(struct seq_file *m, void *unused)
{
	struct gpu *gpu = m->private;

	seq_puts(m, "Model: \t\t NVIDIA stand-in GPU\n");
	seq_printf(m, "IRQ:   \t\t %u\n", gpu->pdev->irq);
	seq_printf(m, "GPU UUID: \t GPU-%pUb\n", gpu->uuid);
	seq_puts(m, "Video BIOS: \t 00.00.00.00.00\n");
	seq_printf(m, "Bus Type: \t %s\n",
		   pci_is_pcie(gpu->pdev) ? "PCIe" : "PCI");
	seq_printf(m, "Bus Location: \t %s\n", gpu->pci);
	seq_printf(m, "Device Minor: \t %u\n", gpu->minor);
	return 0;
}

void proc_add_gpu(struct gpu *gpu)
{
	gpu->proc = proc_mkdir(gpu->pci, proc_gpus);
	if (gpu->proc)
		proc_create_single_data("information", 0444, gpu->proc,
					information_show, gpu);
}

int proc_init(void)
{
	proc_root = proc_mkdir("driver/nvidia", NULL);
	if (!proc_root)
		return -ENOMEM;
	proc_gpus = proc_mkdir("gpus", proc_root);
	if (!proc_gpus || !proc_create_single("version", 0444, proc_root,
					      version_show)) {
		proc_remove(proc_root);
		return -ENOMEM;
	}
	return 0;
}

void proc_exit(void)
{
	proc_remove(proc_root);
}

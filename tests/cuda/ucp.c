// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Shows which freed memory UCX's cache keeps registered. The program sends GPU
 * memory to itself through UCX's public interface, frees the memory, lets UCX
 * look for work, and sends other memory. After each step, the program prints
 * the step and stops itself, so that the test can check the program's state.
 *
 * An optional argument is the size, in MiB, of an allocation in a buffer. A
 * buffer then consists of several adjacent allocations of this size (parts.h),
 * and the program replaces the second one during the run.
 */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda.h>
#include <ucp/api/ucp.h>

#include "parts.h"

#define LENGTH	(8 << 20)
#define TIMES	10

/* Size of a part in bytes, or 0 if a buffer is one allocation. */
static size_t part;
static ucp_context_h library;
static ucp_worker_h worker;
static ucp_ep_h self;

static void fail(const char *what, int status)
{
	printf("%s: %d\n", what, status);
	exit(1);
}

static void check(const char *what, int status)
{
	if (status)
		fail(what, status);
}

static void say(const char *what)
{
	printf("%s\n", what);
	fflush(stdout);
	raise(SIGSTOP);
}

static void *allocate(void)
{
	CUdeviceptr address;

	if (part)
		check("allocate_parts", allocate_parts(&address, LENGTH, part));
	else
		check("cuMemAlloc", cuMemAlloc(&address, LENGTH));
	return (void *)(uintptr_t)address;
}

static void release(void *memory)
{
	if (part)
		check("free_parts", free_parts((uintptr_t)memory));
	else
		check("cuMemFree", cuMemFree((uintptr_t)memory));
}

/* Unmaps the second part and releases its handle, as PyTorch does. */
static void remove_second(void *memory)
{
	CUdeviceptr second = (uintptr_t)memory + part;
	CUmemGenericAllocationHandle handle;

	check("cuMemRetainAllocationHandle",
	      cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)second));
	check("cuMemUnmap", cuMemUnmap(second, part));
	check("cuMemRelease", cuMemRelease(handle));
}

static void add_second(void *memory)
{
	check("add_part", add_part((uintptr_t)memory + part, part));
}

static void wait_for(const char *what, void *request)
{
	ucs_status_t status = UCS_OK;

	if (UCS_PTR_IS_ERR(request))
		fail(what, UCS_PTR_STATUS(request));
	while (request && (status = ucp_request_check_status(request)) == UCS_INPROGRESS)
		ucp_worker_progress(worker);
	check(what, status);
	if (request)
		ucp_request_free(request);
}

static void transfer(void *from, void *to)
{
	ucp_request_param_t none = { .op_attr_mask = 0 };
	void *received = ucp_tag_recv_nbx(worker, to, LENGTH, 1, -1, &none);

	wait_for("send", ucp_tag_send_nbx(self, from, LENGTH, 1, &none));
	wait_for("receive", received);
}

/* Replaces a part in the middle of registered memory. */
static void replace_second(void *from, void *to)
{
	remove_second(from);
	remove_second(to);
	say("unmapped a part");
	add_second(from);
	add_second(to);
	memset(from, 1, LENGTH);
	memset(to, 2, LENGTH);
	transfer(from, to);
	check("another part's bytes", memcmp(from, to, LENGTH));
	say("sent with another part");
}

static void open_worker(void)
{
	ucp_params_t params = {
		.field_mask = UCP_PARAM_FIELD_FEATURES,
		.features = UCP_FEATURE_TAG,
	};
	ucp_worker_params_t single = { .field_mask = 0 };
	ucp_ep_params_t peer = { .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS };
	ucp_address_t *address;
	size_t length;

	check("ucp_init", ucp_init(&params, NULL, &library));
	check("ucp_worker_create", ucp_worker_create(library, &single, &worker));
	check("ucp_worker_get_address",
	      ucp_worker_get_address(worker, &address, &length));
	peer.address = address;
	check("ucp_ep_create", ucp_ep_create(worker, &peer, &self));
	ucp_worker_release_address(worker, address);
}

int main(int count, char **arguments)
{
	CUcontext context;
	void *from, *to;

	if (count > 1)
		part = strtoul(arguments[1], NULL, 10) << 20;
	check("cuInit", cuInit(0));
	check("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain(&context, 0));
	check("cuCtxSetCurrent", cuCtxSetCurrent(context));
	open_worker();

	from = allocate();
	to = allocate();
	for (int i = 0; i < TIMES; i++)
		transfer(from, to);
	say("sent ten times");
	if (part)
		replace_second(from, to);
	release(from);
	release(to);
	say("freed");
	for (int i = 0; i < 1000; i++)
		ucp_worker_progress(worker);
	say("looked for work");
	from = allocate();
	to = allocate();
	transfer(from, to);
	say("sent other memory");
	ucp_worker_destroy(worker);
	ucp_cleanup(library);
	release(from);
	release(to);
	return 0;
}

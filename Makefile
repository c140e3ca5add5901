# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
#
# For people. The module itself is built by kbuild, which reads `Kbuild`.

RIG := tests/rig/bootstrap

# The kernel that `make install` is for.
KVER ?= $(shell uname -r)
KDIR ?= /lib/modules/$(KVER)/build
KBUILD_ARGS = -C $(KDIR) M=$(CURDIR) MO=$(CURDIR)/build/$(KVER)

# Of `make vm` and `make test`.
VM ?=
TEST ?=
# As it was typed: its dollars are the shell's.
override export CMD := $(value CMD)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all kunit vm setup kernel modules lint module install uninstall clean

help: ## Says what there is to make
	@echo 'peermem-rs: nvidia-peermem in Rust. Nothing below needs a GPU or an RDMA card, but module and (un)install.'
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: ## The whole story in one screen: RDMA into GPU memory, in a virtual machine (first time: 15 minutes)
	@$(RIG) demo

test: ## Everything that must hold; TEST='words' chooses runs (see: make test TEST=--list)
	@$(RIG) test $(TEST)

test-all: ## As test, with the runs that take long
	@$(RIG) test --full $(TEST)

kunit: ## The module's KUnit tests alone
	@$(RIG) test KUnit

vm: ## Runs CMD='…' in the virtual machine, or a shell; VM='options' (see: make vm VM=--help)
	@if [ -n "$$CMD" ]; then $(RIG) vm $(VM) -- sh -c "$$CMD"; else $(RIG) vm $(VM); fi

setup: ## Makes all that demo and test need, and runs nothing
	@$(RIG) setup

kernel: ## Makes the rig's kernel alone
	@$(RIG) kernel

modules: ## Makes the modules for the rig's kernel: ours, the stand-in GPU's, NVIDIA's
	@$(RIG) modules

lint: ## Looks at the form of the code: rustfmt, clippy, checkpatch, shellcheck, licences
	@$(RIG) lint

module: ## Compiles the module for this machine's kernel (or KVER=…, KDIR=…)
	$(MAKE) $(KBUILD_ARGS) modules

# NVIDIA's file of the same name stays where it is, and comes second.
install: module ## Installs it for this machine's kernel, as root
	$(MAKE) $(KBUILD_ARGS) INSTALL_MOD_DIR=updates/peermem-rs modules_install
	echo 'override nvidia-peermem * updates/peermem-rs' > /etc/depmod.d/peermem-rs.conf
	depmod $(KVER)

uninstall: ## Removes it again, as root
	rm -rf /lib/modules/$(KVER)/updates/peermem-rs
	rm -f /etc/depmod.d/peermem-rs.conf
	depmod $(KVER)

clean: ## Removes what `make module` left here; the rig's products lie in the user's cache
	rm -rf build

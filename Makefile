# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
#
# For people. The module itself is built by kbuild, which reads `Kbuild`.

RUNNER := tests/runner/bootstrap

# kbuild takes no blanks and no colons in a path. Only `make module` and what stands on it need it here: the test
# runner copies.
ifneq ($(filter module compile install,$(MAKECMDGOALS)),)
ifneq ($(words $(subst :, ,x$(CURDIR)x)),1)
$(error kbuild cannot compile in '$(CURDIR)': move this clone to a folder with neither blanks nor colons in its path)
endif
endif

# The kernel that `make install` is for. DESTDIR puts the host's root elsewhere.
ifdef KDIR
KVER ?= $(shell rust-bindings/release.sh '$(KDIR)')
else
KVER ?= $(shell uname -r)
KDIR = /lib/modules/$(KVER)/build
endif
MODULES = $(abspath $(DESTDIR)/lib/modules)
OURS = $(MODULES)/$(KVER)/updates/peermem-rs
STAGED = $(CURDIR)/build/staged
# Where that lacks what Rust needs, a folder that has it (scripts/headers).
BUILD_FOLDER = $(shell scripts/headers KVER='$(KVER)' KDIR='$(KDIR)')
# kbuild compiles a copy of the source: its products lie beside it, on kernels before 6.13 in any case, and those of one kernel
# are nothing to another.
COPY = $(CURDIR)/build/$(KVER)
KBUILD_ARGS = -C $(BUILD_FOLDER) M=$(COPY) $(KBUILD_LLVM) $(KBUILD_CC)
# The objects of the portable build. A release has all of them.
OBJECTS = portable/nvidia_peermem-x86_64.o_shipped portable/nvidia_peermem-aarch64.o_shipped
# That for the kernel: by the processors in its configuration or, where there is none, by this machine's.
OBJECT = portable/nvidia_peermem-$(shell if grep -qs '^CONFIG_ARM64=y' '$(KDIR)/include/config/auto.conf'; then echo aarch64; \
	elif grep -qs '^CONFIG_X86_64=y' '$(KDIR)/include/config/auto.conf'; then echo x86_64; else uname -m; fi).o_shipped
# A kernel that clang built takes nothing else.
KBUILD_LLVM = $(if $(LLVM),,$(shell grep -qs '^CONFIG_CC_IS_CLANG=y' $(KDIR)/include/config/auto.conf && echo LLVM=1))
# A kernel's flags may be those of another gcc than the usual one: that which built it is taken where it is here.
KBUILD_CC = $(if $(filter default,$(origin CC)),$(if $(LLVM)$(KBUILD_LLVM),,$(shell \
	gcc=$$(sed -n 's/^CONFIG_CC_VERSION_TEXT="\([^ "]*\).*/\1/p' $(KDIR)/include/config/auto.conf 2>/dev/null); \
	command -v "$$gcc" >/dev/null && echo CC=$$gcc)))

# Told what make was told.
LOOK = scripts/check KVER='$(KVER)' KDIR='$(KDIR)' $(MAKEOVERRIDES)
# CHECK=no: `make module` goes on whatever is missing.
CHECK ?=

# Of `make tools`, and of what installs them. The units and completions go below PREFIX, too.
CARGO ?= cargo
PREFIX ?= /usr/local
TOOLS = build/tools
PEERMEMCTL = $(TOOLS)/release/peermemctl

# Of `make vm` and `make demo`, `make test`, `make mutants` and `make bench`.
VM ?=
TEST ?=
FRESH ?=
STRICT ?=
MUTANT ?=
BENCH ?=
# As it was typed: its dollars are the shell's.
override export CMD := $(value CMD)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all quick stress hazards bench cost mutants debian kunit vm setup kernel modules lint check object dist module compile install uninstall deb tools install-tools uninstall-tools clean

help: ## Says what there is to make
	@echo 'peermem-rs: nvidia-peermem in Rust. Nothing below needs a GPU or an RDMA NIC, but module and (un)install.'
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: ## The whole story in one screen: RDMA into GPU memory, in a virtual machine (first time: some minutes more); VM='--kernel 6.1' on another kernel
	@$(RUNNER) demo $(VM)

test: ## Everything that must hold; TEST='words' chooses runs (TEST=--list), FRESH=1 does unchanged ones too, STRICT=1 tries none twice
	@$(RUNNER) test $(if $(FRESH),--fresh) $(if $(STRICT),--strict) $(TEST)

test-all: ## As test, strict, with the runs that take long; goes on where it was interrupted (TEST=--restart: anew)
	@$(RUNNER) test --full $(TEST)

quick: ## While editing: host tests, the module compiled, lint of what changed
	@$(RUNNER) quick

stress: ## Many processes at everything, MINUTES long, on from where the last run ended; SEED=… EPOCH=… repeats
	@$(RUNNER) stress $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(if $(EPOCH),--epoch $(EPOCH))

debian: ## The module installed by DKMS on Debian 12 and 13, whose stock kernels a machine boots (the first time: 30 minutes more)
	@$(RUNNER) test --full "installed on Debian"

kunit: ## The module's KUnit tests alone, on the ordinary and the debug kernel
	@$(RUNNER) test KUnit

hazards: ## Runs the schedules of all known hazards and writes docs/hazards.md
	@$(RUNNER) hazards

bench: ## Measures this module and NVIDIA's beside each other and writes docs/performance.md; BENCH=--page only writes
	@$(RUNNER) bench $(BENCH)

cost: ## Counts a registration's instructions and compares them with tests/cost/figures; UPDATE=1 writes them there and into the page
	@$(RUNNER) cost $(if $(UPDATE),--update)

mutants: ## Takes each rule out of the module and sees that a test notices; MUTANT='words' chooses
	@$(RUNNER) mutants $(MUTANT)

vm: ## Runs CMD='…' in the virtual machine, or a shell; VM='options' (see: make vm VM=--help)
	@if [ -n "$$CMD" ]; then $(RUNNER) vm $(VM) -- sh -c "$$CMD"; else $(RUNNER) vm $(VM); fi

setup: ## Makes all that demo and test need, and runs nothing
	@$(RUNNER) setup

kernel: ## Makes the test VM's kernel alone
	@$(RUNNER) kernel

modules: ## Makes the modules for the test VM's kernel: ours, the stand-in GPU's, NVIDIA's
	@$(RUNNER) modules

lint: ## Looks at the form of the code: rustfmt, clippy, checkpatch, shellcheck, promtool, licences
	@$(RUNNER) lint

check: ## Says what a build for this machine's kernel (or KVER=…, KDIR=…) lacks
	@$(LOOK)

object: $(OBJECT) ## Compiles the Rust code into the object of the portable build, with rustc and rust-src and without a kernel

$(OBJECTS): portable/nvidia_peermem-%.o_shipped: $(wildcard src/*.rs src/*/*.rs portable/*.rs portable/*.sh portable/kernel/*.rs portable/kernel/*/*.rs rust-bindings/bindings.rs)
	portable/object.sh $* build/object/$*/nvidia_peermem.o
	cp build/object/$*/nvidia_peermem.o $@

dist: $(OBJECTS) ## Makes a release in build/dist: the source of this commit with the objects, a Debian package, their hashes
	packaging/dist

module: ## Compiles the module for this machine's kernel (or KVER=…, KDIR=…), if `make check` has nothing against it
	@$(LOOK) -q -m $(if $(filter no,$(CHECK)),|| true)
	@$(MAKE) --no-print-directory compile

# Without -m scripts/check has said what is wrong already. Installing takes the build that was compiled, whatever is in root's
# PATH. In a clone the object follows its source; a release keeps what it has. A file is copied if its contents differ,
# whatever its time says: those of a release are as old as its commit.
compile:
	@mkdir -p $(COPY)
	@[ "$(filter install,$(MAKECMDGOALS))" ] && grep -qs ^PEERMEM_BUILD= $(COPY)/build || $(LOOK) -b >$(COPY)/build
	@echo "  build: $$(cat $(COPY)/build)"
	@! grep -q ^PEERMEM_BUILD=portable $(COPY)/build || [ "$(PEERMEM_OBJECT)" ] || { [ -e $(OBJECT) ] && [ ! -e .git ]; } || \
		$(MAKE) --no-print-directory object
	@find Kbuild src portable rust-bindings kunit -type f '(' -name Kbuild -o -name '*.[chS]' -o -name '*.rs' -o -name '*.sh' \
		-o -name '*.o_shipped' ')' ! -path rust-bindings/generated.rs ! -path src/compat-found.h 2>/dev/null | \
		while read -r file; do \
			cmp -s "$$file" "$(COPY)/$$file" || { mkdir -p "$$(dirname "$(COPY)/$$file")" && cp "$$file" "$(COPY)/$$file"; } || exit; \
		done
	$(MAKE) $(KBUILD_ARGS) $$(sed 's/ (.*//' $(COPY)/build) modules

# kbuild signs and compresses as the kernel wants it. The file then gets a name of its own beside NVIDIA's, which stays
# where it is: packaging/depmod.conf says why. depmod reads the host's configuration, so with DESTDIR it is left to
# whoever moves the files to a host. What is compiled is not looked at again: root need not have the compilers in its PATH.
install: $(if $(wildcard build/$(KVER)/nvidia-peermem.ko),compile,module) ## Installs it for this machine's kernel, as root; see docs/install.md
	rm -rf $(STAGED)
	$(MAKE) $(KBUILD_ARGS) INSTALL_MOD_PATH=$(STAGED) INSTALL_MOD_DIR=peermem-rs DEPMOD=true modules_install
	rm -rf $(OURS)
	cd $(STAGED)/lib/modules/*/peermem-rs && for file in nvidia-peermem.ko*; do \
		install -D -m 644 $$file $(OURS)/nvidia_peermem$${file#nvidia-peermem} || exit; done
	rm -rf $(STAGED)
	packaging/host install $(MODULES) $(KVER)
	$(if $(DESTDIR),,depmod $(KVER))

uninstall: ## Removes it again, as root
	rm -rf $(OURS)
	rmdir $(MODULES)/$(KVER)/updates 2>/dev/null || true
	packaging/host remove $(MODULES)
	$(if $(DESTDIR),,depmod $(KVER))

tools: ## Compiles peermemctl, what operators run, for this machine (docs/peermemctl.md)
	$(CARGO) build --release --locked --target-dir $(TOOLS) -p peermemctl

# What is compiled is not looked at again: root need not have cargo.
install-tools: $(if $(wildcard $(PEERMEMCTL)),,tools) ## Installs peermemctl, its man pages, completions and units below PREFIX, as root
	packaging/tools install $(PEERMEMCTL) $(PREFIX) $(abspath $(DESTDIR))

uninstall-tools: ## Removes them again, as root
	packaging/tools remove $(PREFIX) $(abspath $(DESTDIR))

deb: ## Makes a Debian package of the source for DKMS, in build/deb
	@$(RUNNER) deb

clean: ## Removes what `make module` left here; the test runner's products lie in the user's cache
	rm -rf build

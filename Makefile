# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
#
# Targets for people. kbuild builds the module itself, and reads `Kbuild`.

RUNNER := tests/runner/bootstrap

# kbuild does not support blanks and colons in a path. This only concerns
# `make module` and targets that use it: the test runner works on a copy.
ifneq ($(filter module compile install,$(MAKECMDGOALS)),)
ifneq ($(words $(subst :, ,x$(CURDIR)x)),1)
$(error kbuild cannot compile in '$(CURDIR)': move this clone to a folder with neither blanks nor colons in its path)
endif
endif

# The kernel for `make install`. DESTDIR is the host's root, if it is not /.
ifdef KDIR
KVER ?= $(shell rust-bindings/release.sh '$(KDIR)')
else
KVER ?= $(shell uname -r)
KDIR = /lib/modules/$(KVER)/build
endif
MODULES = $(abspath $(DESTDIR)/lib/modules)
OURS = $(MODULES)/$(KVER)/updates/peermem-rs
STAGED = $(CURDIR)/build/staged
# `su` without a dash keeps a user's PATH, which may lack the folder of depmod.
DEPMOD = $(if $(DESTDIR),,PATH="$$PATH:/usr/sbin:/sbin" depmod $(KVER))
# KDIR, or the folder that scripts/headers makes if KDIR lacks metadata for
# Rust.
BUILD_FOLDER = $(shell scripts/headers KVER='$(KVER)' KDIR='$(KDIR)')
# kbuild compiles a copy of the source. At least before 6.13, kbuild puts
# products beside their source, and products for one kernel are useless for
# another.
COPY = $(CURDIR)/build/$(KVER)
KBUILD_ARGS = -C $(BUILD_FOLDER) M=$(COPY) $(KBUILD_LLVM) $(KBUILD_CC)
# The objects of the portable build. A release has all these objects.
OBJECTS = portable/nvidia_peermem-x86_64.o_shipped portable/nvidia_peermem-aarch64.o_shipped
# The object for this kernel. The kernel's configuration names the architecture.
# Without a configuration, the architecture is that of this machine.
OBJECT = portable/nvidia_peermem-$(shell if grep -qs '^CONFIG_ARM64=y' '$(KDIR)/include/config/auto.conf'; then echo aarch64; \
	elif grep -qs '^CONFIG_X86_64=y' '$(KDIR)/include/config/auto.conf'; then echo x86_64; else uname -m; fi).o_shipped
# Modules for a kernel that was built with clang need clang.
KBUILD_LLVM = $(if $(LLVM),,$(shell grep -qs '^CONFIG_CC_IS_CLANG=y' $(KDIR)/include/config/auto.conf && echo LLVM=1))
# The default gcc may not know all compiler flags of the kernel. The gcc that
# built the kernel is therefore used, if it is installed. The environment's CC is
# ignored, as kbuild ignores it.
KBUILD_CC = $(if $(filter default environment,$(origin CC)),$(if $(LLVM)$(KBUILD_LLVM),,$(shell \
	gcc=$$(sed -n 's/^CONFIG_CC_VERSION_TEXT="\{0,1\}\([^ "]*\).*/\1/p' $(KDIR)/include/config/auto.conf 2>/dev/null); \
	gcc=$(CROSS_COMPILE)$${gcc#$(CROSS_COMPILE)}; command -v "$$gcc" >/dev/null && echo CC=$$gcc)))

# Passes on the variables of make's command line.
LOOK = scripts/check KVER='$(KVER)' KDIR='$(KDIR)' $(MAKEOVERRIDES)
# Variables of the build, for `make install`: those of make's command line, and
# those of the environment that scripts/check reads.
SAVED = $(COPY)/variables
VARIABLES = $(foreach name,$(filter-out KVER KDIR DESTDIR CHECK PREFIX V KEEP,$(sort $(foreach word,$(MAKEOVERRIDES),$(firstword $(subst =, ,$(word)))) \
	LLVM NV_P2P_INCLUDE NV_SYMVERS PEER_MEM_INCLUDE PEERMEM_BUILD PEERMEM_OBJECT PEERMEM_NO_GPL_ONLY PEERMEM_KUNIT KBUILD_MODPOST_WARN)),$(if \
	$(filter command environment,$(firstword $(origin $(name)))),$(name)='$(subst ','\'',$(value $(name)))'))
# CHECK=no lets `make module` continue even if something is missing.
CHECK ?=

# Variables of `make tools` and of the targets that install. Units and completions are
# installed below PREFIX, too.
CARGO ?= cargo
PREFIX ?= /usr/local
TOOLS = build/tools
PEERMEMCTL = $(TOOLS)/release/peermemctl
PRELOAD = $(TOOLS)/release/libpeermem_preload.so
# The packed peermemctl is linked for an old version of glibc, so it also runs
# on old hosts. packaging/tools contains the version number. zig can link for
# that version.
ZIG = build/zig
ZIG_PACKAGES = cargo-zigbuild==0.24.1 ziglang==0.17.1
DIST = build/dist
PACKED = x86_64-unknown-linux-gnu
GLIBC = $(shell sed -n 's/^GLIBC=//p' packaging/tools)

# Variables of `make vm` and `make demo`, `make test`, `make mutants` and `make bench`.
VM ?=
TEST ?=
FRESH ?=
STRICT ?=
MUTANT ?=
BENCH ?=
# make passes on CMD unexpanded, because the dollar signs in it are for the shell.
override export CMD := $(value CMD)

.DEFAULT_GOAL := help
# A full disk may truncate a target. The truncated file would be newer than its
# source.
.DELETE_ON_ERROR:
# `make -j module install` makes one target after the other. kbuild still uses
# all jobs.
.NOTPARALLEL:
.PHONY: help demo test test-all quick stress hazards bench cost mutants debian kunit vm setup kernel modules lint check object dist dist-module dist-tools module compile install uninstall deb tools install-tools uninstall-tools clean

help: ## Lists the targets
	@echo 'peermem-rs: nvidia-peermem in Rust. Nothing below needs a GPU or an RDMA NIC, except module and (un)install.'
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: ## Shows RDMA into GPU memory in a virtual machine (the first time takes 10 minutes); VM='--kernel 6.1' chooses a kernel
	@$(RUNNER) demo $(VM)

test: ## Runs the tests; TEST='words' chooses tests (TEST=--list shows all), FRESH=1 also runs tests whose inputs did not change, STRICT=1 repeats no failed test
	@$(RUNNER) test $(if $(FRESH),--fresh) $(if $(STRICT),--strict) $(TEST)

test-all: ## Runs all tests, slow ones too, strictly; continues an interrupted run (TEST=--restart starts anew)
	@$(RUNNER) test --full $(TEST)

quick: ## Runs the fast checks for editing: host tests, a build of the module, lint of changed files
	@$(RUNNER) quick

stress: ## Runs random operations in many processes for MINUTES, and continues where the last run ended; SEED=… EPOCH=… repeats one epoch
	@$(RUNNER) stress $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(if $(EPOCH),--epoch $(EPOCH))

debian: ## Installs the module by DKMS on Debian 12 and 13, and boots their kernels (the first time takes 30 minutes more)
	@$(RUNNER) test --full "installed on Debian"

kunit: ## Runs only the module's KUnit tests, on the ordinary and the debug kernel
	@$(RUNNER) test KUnit

hazards: ## Runs the schedules of all known hazards and writes docs/hazards.md
	@$(RUNNER) hazards

bench: ## Measures this module and NVIDIA's, and writes docs/performance.md; BENCH=--page only writes the page
	@$(RUNNER) bench $(BENCH)

cost: ## Counts a registration's instructions and compares them with tests/cost/figures; UPDATE=1 updates the file and docs/performance.md
	@$(RUNNER) cost $(if $(UPDATE),--update)

mutants: ## Removes each rule of the module in turn, and checks that a test notices; MUTANT='words' chooses
	@$(RUNNER) mutants $(MUTANT)

vm: ## Runs CMD='…' in the virtual machine, or a shell; VM='options' (see: make vm VM=--help)
	@if [ -n "$$CMD" ]; then $(RUNNER) vm $(VM) -- sh -c "$$CMD"; else $(RUNNER) vm $(VM); fi

setup: ## Builds everything that demo and test need
	@$(RUNNER) setup

kernel: ## Builds only the test VM's kernel
	@$(RUNNER) kernel

modules: ## Builds the modules for the test VM's kernel: ours, the stand-in GPU's, NVIDIA's
	@$(RUNNER) modules

lint: ## Runs rustfmt, clippy, checkpatch, shellcheck, promtool and checks of licences and comments
	@$(RUNNER) lint

check: ## Says what is missing to build for this machine's kernel (or KVER=…, KDIR=…)
	@$(LOOK)

object: $(OBJECT) ## Compiles the Rust code into the object of the portable build, with rustc and rust-src and without a kernel

$(OBJECTS): portable/nvidia_peermem-%.o_shipped: $(wildcard src/*.rs src/*/*.rs portable/*.rs portable/*.sh portable/kernel/*.rs portable/kernel/*/*.rs rust-bindings/bindings.rs \
	src/*.h portable/*.[ch])
	portable/object.sh $* build/object/$*/nvidia_peermem.o
	cp build/object/$*/nvidia_peermem.o $@

dist: dist-module dist-tools ## Builds a release in build/dist: the source with the objects, packages of the module and of peermemctl, their hashes

dist-module: $(OBJECTS)
	packaging/dist

dist-tools: $(ZIG)/packages
	PATH="$(abspath $(ZIG))/bin:$$PATH" $(CARGO) zigbuild --release --locked --target-dir $(TOOLS) --target $(PACKED).$(GLIBC) -p peermemctl -p peermem-preload
	packaging/tools pack $(TOOLS)/$(PACKED)/release/peermemctl $(DIST)

$(ZIG)/packages: Makefile
	python3 -m venv $(ZIG)
	$(ZIG)/bin/pip install --quiet --disable-pip-version-check $(ZIG_PACKAGES)
	echo '$(ZIG_PACKAGES)' >$@

module: ## Compiles the module for this machine's kernel (or KVER=…, KDIR=…), if `make check` finds nothing missing
	@$(LOOK) -q -m $(if $(filter no,$(CHECK)),|| true)
	@$(MAKE) --no-print-directory compile

# `scripts/check -b` names the build and prints no problems. An earlier call has
# already printed the problems. `make install` sets KEEP, which keeps the choice of
# the build, because root's PATH may lack the tools of the first choice. In a
# clone, the object of the portable build is rebuilt if its source changes. A
# release keeps its object. A file is copied if its contents differ. Its time is
# ignored, because all files of a release have the time of the release's commit.
compile:
	@mkdir -p $(COPY)
	@printf '%s\n' '$(subst ','\'',$(VARIABLES))' >$(SAVED)
	@[ "$(KEEP)" ] && grep -qs ^PEERMEM_BUILD= $(COPY)/build || $(LOOK) -b >$(COPY)/build
	@echo "  build: $$(cat $(COPY)/build)"
	@! grep -q ^PEERMEM_BUILD=portable $(COPY)/build || [ "$(PEERMEM_OBJECT)" ] || { [ -e $(OBJECT) ] && [ ! -e .git ]; } || \
		$(MAKE) --no-print-directory object
	@find Kbuild src portable rust-bindings kunit -type f '(' -name Kbuild -o -name '*.[chS]' -o -name '*.rs' -o -name '*.sh' \
		-o -name '*.o_shipped' ')' ! -path rust-bindings/generated.rs ! -path src/compat-found.h 2>/dev/null | \
		while read -r file; do \
			cmp -s "$$file" "$(COPY)/$$file" || { mkdir -p "$$(dirname "$(COPY)/$$file")" && cp "$$file" "$(COPY)/$$file"; } || exit; \
		done
	$(MAKE) $(KBUILD_ARGS) $$(sed 's/ (.*//' $(COPY)/build) modules

# kbuild signs and compresses the module as the kernel requires. The installed
# file has its own name, and NVIDIA's module stays in place: see
# packaging/depmod.conf. depmod reads the host's configuration, so with DESTDIR
# the user runs depmod after copying the files to a host. A compiled module is
# not checked again: root need not have the compilers in PATH. `make install`
# always runs kbuild, with the variables of `make module`: sources, nvidia.ko or
# OFED may have changed. If nothing changed, kbuild links no new module, and a
# signature made by hand stays. The variables of `make install` come last, and
# take precedence.
install: ## Installs the module for this machine's kernel, as root; see docs/install.md
	@$(MAKE) --no-print-directory $(shell cat $(SAVED) 2>/dev/null) $(MAKEOVERRIDES) \
		$$([ -e $(COPY)/nvidia-peermem.ko ] && echo compile $(if $(filter PEERMEM_%,$(MAKEOVERRIDES)),,KEEP=build) || echo module)
	rm -rf $(STAGED)
	$(MAKE) $(KBUILD_ARGS) INSTALL_MOD_PATH=$(STAGED) INSTALL_MOD_DIR=peermem-rs DEPMOD=true modules_install
	rm -rf $(OURS)
	cd $(STAGED)/lib/modules/*/peermem-rs && for file in nvidia-peermem.ko*; do \
		install -D -m 644 $$file $(OURS)/nvidia_peermem$${file#nvidia-peermem} || exit; done
	rm -rf $(STAGED)
	packaging/host install $(MODULES) $(KVER)
	$(DEPMOD)

uninstall: ## Removes the module, as root
	rm -rf $(OURS)
	rmdir $(MODULES)/$(KVER)/updates 2>/dev/null || true
	packaging/host remove $(MODULES) $(KVER)
	$(DEPMOD)

tools: ## Compiles peermemctl, the tool for operators (docs/peermemctl.md), and libpeermem_preload.so (docs/dma-buf.md)
	$(CARGO) build --release --locked --target-dir $(TOOLS) -p peermemctl -p peermem-preload

# Compiled tools are not checked again: root need not have cargo.
install-tools: $(if $(and $(wildcard $(PEERMEMCTL)),$(wildcard $(PRELOAD))),,tools) ## Installs peermemctl and libpeermem_preload.so, with man pages, completions and units, below PREFIX, as root
	packaging/tools install $(PEERMEMCTL) $(PREFIX) $(abspath $(DESTDIR))

uninstall-tools: ## Removes peermemctl, libpeermem_preload.so and their files, as root
	packaging/tools remove $(PREFIX) $(abspath $(DESTDIR))

deb: ## Builds a Debian package of the source for DKMS in build/deb
	@$(RUNNER) deb

clean: ## Removes the folder build; the test runner's products are in the user's cache, and stay
	rm -rf build

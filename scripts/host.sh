# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# shellcheck shell=sh disable=SC2034 # the scripts that source this file use the variables
#
# Functions that find facts about a host, for scripts/check and scripts/headers, which source this
# file. The facts are the host's files below PROBE_ROOT (default: the host's root), the kernel of
# KVER and KDIR, and the package names of the host's distribution.

root=${PROBE_ROOT:+$(cd -P "$PROBE_ROOT" && pwd)} || exit 2
root=${root%/}
# Adds the folders of modinfo and similar tools, because some users' PATH lacks them.
PATH=$PATH:$root/usr/sbin:$root/sbin
export LC_ALL=C

# `at` converts a path on the host to a path below $root. `name` converts a path below $root to the
# path on the host.
at() { case $1 in "$root"/* | [!/]*) printf '%s\n' "$1" ;; *) printf '%s\n' "$root$1" ;; esac; }
name() { printf '%s\n' "${1#"$root"}"; }

# Prints the target of a link. An absolute target is looked up below PROBE_ROOT. The round brackets
# make the variables local.
follow() (
	path=$1
	hops=x
	# A link may lead back to itself. The limit of 40 is that of the kernel.
	while [ ${#hops} -le 40 ] && to=$(readlink "$path"); do
		hops=x$hops
		case $to in /*) path=$(at "$to") ;; *) path=$(dirname "$path")/$to ;; esac
	done
	printf '%s\n' "$path"
)

# `version` prints the first version number in a text. `at_least` succeeds if version $1 is $2 or
# newer.
version() { printf '%s\n' "$1" | sed -nE '1s/^[^0-9]*([0-9]+(\.[0-9]+)*).*/\1/p'; }
at_least() { [ "$(printf '%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

# Sets $kdir to the build folder KDIR, and $found_release to the release that this folder contains.
# Sets $release to KVER (default: $found_release, or else the running kernel).
find_kernel() {
	running=$(cat "$root/proc/sys/kernel/osrelease" 2>/dev/null) || running=''
	release=${KVER:-$running}
	KDIR=${KDIR:-/lib/modules/$release/build}
	kdir=$(follow "$(at "${KDIR%/}")")
	[ ! -d "$kdir" ] || kdir=$(cd -P "$kdir" && pwd)
	found_release=$("$here/rust-bindings/release.sh" "$kdir")
	release=${KVER:-${found_release:-$release}}
	series=$(version "$release" | cut -d . -f 1,2)
	# Folder of Ubuntu's package of Rust metadata. The link in Ubuntu's headers may point
	# elsewhere.
	lib_rust=$root/usr/src/linux-lib-rust-$release
	# Distributions also install the configuration beside the kernel's image.
	for configuration in "$kdir/include/config/auto.conf" "$root/boot/config-$release" "$root/lib/modules/$release/config" \
		/dev/null; do
		[ ! -r "$configuration" ] || break
	done
}

has_metadata() { [ -s "$(follow "$1/rust")/libkernel.rmeta" ]; }

# Prints an option of the kernel's configuration: y, m, a value, or nothing.
config() { sed -n "s/^CONFIG_$1=\"\{0,1\}\([^\"]*\).*/\1/p" "$configuration"; }

# Prints the module that exports symbol $1, according to the Module.symvers $2.
exporter() {
	[ ! -e "$2" ] || awk -F '\t' -v symbol="$1" '$2 == symbol { sub(".*/", "", $3); print $3; exit }' "$2"
}

# Prints the file of the first of these modules that is installed for this kernel.
installed() { PROBE_ROOT=$root "$here/rust-bindings/installed.sh" "$release" "$@"; }

os_release() { sed -n "s/^$1=//p" "$root/etc/os-release" 2>/dev/null | tr -d '"'; }

# Sets $family to the family of the host's distribution, as in the table of `install`, or to nothing
# if the table does not have the distribution.
find_family() {
	case " $(os_release ID) $(os_release ID_LIKE) " in
	*' ubuntu '*) family=ubuntu ;;
	*' debian '*) family=debian ;;
	*' rhel '* | *' fedora '*) family=rhel ;;
	*' arch '*) family=arch ;;
	*) family='' ;;
	esac
}

# Prints how to install item $1 of the table: with the command for its package, or, if the package
# is not known, with the description $2. $3 is the package name of a compiler, which depends on the
# kernel.
install() (
	of=${3-}
	case $release in
	*+*) devel=kernel-${release##*+}-devel-${release%+*} ;;
	*) devel=kernel-devel-$release ;;
	esac
	pkgbase=$(cat "$root/usr/lib/modules/$release/pkgbase" 2>/dev/null || echo linux)
	package=$(sed -n "s/^$1 .*${family:-none}=\([^,]*\).*/\1/p" <<-END
		headers debian=linux-headers-$release, ubuntu=linux-headers-$release, rhel=$devel, arch=$pkgbase-headers
		crates ubuntu=linux-lib-rust-$release, arch=$pkgbase-headers
		rustc debian=rustc, ubuntu=$of, rhel=rust, arch=rust
		bindgen debian=bindgen, ubuntu=bindgen, rhel=bindgen-cli, arch=rust-bindgen
		libclang debian=libclang-dev, ubuntu=libclang-dev, rhel=clang-libs, arch=clang
		compiler debian=$of, ubuntu=$of, rhel=${of%%-*}, arch=${of%%-*}
		driver debian=nvidia-open-kernel-dkms, arch=nvidia-open-dkms
		xz debian=xz-utils, ubuntu=xz-utils, rhel=xz, arch=xz
	END
	)
	case $1 in
	make | binutils | lld | llvm | zstd) package=$1 ;;
	esac
	case ${package:+$family} in
	debian | ubuntu) echo "run 'apt install $package'" ;;
	rhel) echo "run 'dnf install $package'" ;;
	arch) echo "run 'pacman -S $package'" ;;
	*) echo "install $2" ;;
	esac
)

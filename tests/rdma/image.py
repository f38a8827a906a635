"""What the machines boot: a Debian kernel with Soft-RoCE, and an init that gives them this machine's files.

Both come from Debian packages that are downloaded and unpacked, not installed, and are kept in the cache
directory until the list of modules or the init script changes.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
CACHE = REPO / ".cache" / "rdma-machines"
KERNEL_PACKAGE = "linux-image-amd64"
"""Depends on the newest kernel of the release; that kernel's package is unpacked."""
SHELL_PACKAGE = "busybox-static"

MODULES = (
    *("virtio_pci", "virtio_net"),
    *("9pnet_virtio", "9p", "overlay"),
    *("crc32_generic", "ib_uverbs", "rdma_rxe"),
)
"""Modules in the order of loading, each after those that it needs. rdma_rxe asks for crc32 by name only."""

INIT = """\
#!/bin/busybox sh
# Makes the host's files, read-only, with what is written on top of them in memory, the root of the agent.
export PATH=/bin
/bin/busybox mkdir -p /proc /sys /dev /host /memory /sysroot
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
while read -r module; do insmod "/modules/$module" || echo "cannot load $module"; done < /modules/order
mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=loose,ro host /host
mount -t tmpfs -o size=60% memory /memory
mkdir /memory/upper /memory/work
mount -t overlay -o lowerdir=/host,upperdir=/memory/upper,workdir=/memory/work overlay /sysroot
for name in proc sys dev; do mount --bind "/$name" "/sysroot/$name"; done
mkdir -p /sysroot/dev/shm
mount -t tmpfs shm /sysroot/dev/shm
mount -t tmpfs tmp /sysroot/run
address=$(sed -n 's/.*machine_address=\\([^ ]*\\).*/\\1/p' /proc/cmdline)
ip link set lo up
ip addr add "$address/24" dev eth0
ip link set eth0 up
ip addr add 10.0.2.15/24 dev eth1
ip link set eth1 up
ip route add default via 10.0.2.2
echo "the machine is up"
# The last step is the host's own: a script, because its paths are not known here.
chroot /sysroot /bin/sh "$(sed -n 's/.*machine_start=\\([^ ]*\\).*/\\1/p' /proc/cmdline)"
echo "the agent ended"
poweroff -f
"""


class ImageMissing(Exception):
    """The kernel is not to be had; the message says what to do."""


@dataclass(frozen=True)
class BootImage:
    """Files for QEMU's ``-kernel`` and ``-initrd``."""

    kernel: Path
    initrd: Path


def boot_image() -> BootImage:
    """Return the image from the cache; make it when it is not there. Raises ImageMissing."""
    key = hashlib.sha256("\n".join((*MODULES, INIT)).encode()).hexdigest()[:16]
    home = CACHE / f"image-{key}"
    if not home.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="build-") as work:
            made = Path(work, "image")
            made.mkdir()
            _make(Path(work), made)
            for outdated in CACHE.glob("image-*"):
                shutil.rmtree(outdated, ignore_errors=True)
            made.rename(home)
    return BootImage(home / "vmlinuz", home / "initrd")


def _make(work: Path, image: Path) -> None:
    if os.geteuid() == 0:  # an outdated list names packages that are gone
        _output("apt-get", "update", "-qq")
    depends = _output("apt-cache", "depends", "--important", KERNEL_PACKAGE)
    names = re.findall(r"Depends: (linux-image-\S+)", depends)
    if not names:
        raise ImageMissing(
            f"no package {KERNEL_PACKAGE} is known; on Debian 12 or later for amd64: apt-get update"
        )
    root = work / "root"
    for package in (names[0], SHELL_PACKAGE):
        _unpack(package, work, root)
    (kernel,) = root.glob("boot/vmlinuz-*")
    shutil.copy(kernel, image / "vmlinuz")
    modules = _modules_in_order(next(root.glob("**/lib/modules/*/kernel")).parent)
    (busybox,) = [path for path in root.glob("**/bin/busybox") if not path.is_symlink()]
    archive = CpioArchive()
    for name in ("bin", "modules"):
        archive.add_directory(name)
    archive.add_file("bin/busybox", busybox.read_bytes(), executable=True)
    archive.add_file("init", INIT.encode(), executable=True)
    for name, content in modules.items():
        archive.add_file(f"modules/{name}.ko", content)
    archive.add_file("modules/order", "".join(f"{name}.ko\n" for name in modules).encode())
    (image / "initrd").write_bytes(archive.finished())


def _unpack(package: str, work: Path, root: Path) -> None:
    """Download a package and unpack it below ``root``, without installing it."""
    with tempfile.TemporaryDirectory(dir=work) as downloads:
        # apt changes to a user that cannot write here, and warns when it cannot.
        _output("apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", package, directory=downloads)
        (archive,) = Path(downloads).glob("*.deb")
        _output("dpkg-deb", "-x", str(archive), str(root))


def _output(*command: str, directory: str | None = None) -> str:
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
        )
    except FileNotFoundError:
        raise ImageMissing(f"no command {command[0]}; the machines need Debian 12 or later") from None
    if done.returncode != 0:
        raise ImageMissing(f"{' '.join(command)}: status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


# --- kernel modules -------------------------------------------------------------------------------------


def _modules_in_order(release: Path) -> dict[str, bytes]:
    """MODULES and all that they need, by name, in an order in which they load."""
    paths = {_module_name(path.name): path for path in (release / "kernel").rglob("*.ko*")}
    built_in = {_module_name(Path(line).name) for line in (release / "modules.builtin").read_text().split()}
    loaded: dict[str, bytes] = {}

    def load(name: str, wanted_by: str) -> None:
        if name in loaded or name in built_in:
            return
        if name not in paths:
            raise ImageMissing(f"{release.name} has no module {name}, which {wanted_by} needs")
        content = _module_content(paths[name])
        for other in _needs(content):
            load(other, name)
        loaded[name] = content

    for name in MODULES:
        load(name, "this test")
    return loaded


def _module_name(file_name: str) -> str:
    return file_name.split(".ko")[0].replace("-", "_")


def _module_content(path: Path) -> bytes:
    content = path.read_bytes()
    return lzma.decompress(content) if path.suffix == ".xz" else content


def _needs(module: bytes) -> list[str]:
    """Names of the modules that must be loaded first, from the section .modinfo."""
    needs = re.search(rb"\0depends=([^\0]*)\0", module)
    return [name.replace("-", "_") for name in needs[1].decode().split(",") if name] if needs else []


# --- the archive that the kernel unpacks as its first root ------------------------------------------------


class CpioArchive:
    """An archive in the format "newc" of cpio."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_entries = 0

    def add_directory(self, name: str) -> None:
        self._add(name, b"", 0o040755)

    def add_file(self, name: str, content: bytes, *, executable: bool = False) -> None:
        self._add(name, content, 0o100755 if executable else 0o100644)

    def finished(self) -> bytes:
        self._add("TRAILER!!!", b"", 0)
        return b"".join(self._parts)

    def _add(self, name: str, content: bytes, mode: int) -> None:
        self._num_entries += 1
        encoded = name.encode() + b"\0"
        # inode, mode, uid, gid, links, mtime, size, device and its kind (four), length of name, checksum
        fields = (self._num_entries, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
        header = b"070701" + b"".join(b"%08x" % field for field in fields)
        self._parts += [_padded(header + encoded), _padded(content)]


def _padded(block: bytes) -> bytes:
    return block + bytes(-len(block) % 4)

// SPDX-License-Identifier: MIT
// The structures are those of the System V ABI: an object's PT_DYNAMIC segment names its relocations, symbols and
// strings; a relocation of kind JUMP_SLOT, GLOB_DAT or "64 bit address" says into which slot the address of which
// symbol goes.
#include "kernel_ext/imported_functions.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace overmind {
namespace {

#if defined(__x86_64__)
constexpr std::uint32_t kSlotKinds[] = {R_X86_64_JUMP_SLOT, R_X86_64_GLOB_DAT, R_X86_64_64};
#elif defined(__aarch64__)
constexpr std::uint32_t kSlotKinds[] = {R_AARCH64_JUMP_SLOT, R_AARCH64_GLOB_DAT, R_AARCH64_ABS64};
#else
#error "the relocation kinds of this processor are not known here"
#endif

using Slot = void*;

struct Replaced {
  Slot* slot;
  void* original;
  void* ours;
};

struct Seen {
  std::uintptr_t base;
  std::string name;
  bool operator==(const Seen&) const = default;
};

// The part of an object that is needed here. Pointers into the object; null where it has no such table.
struct Object {
  std::uintptr_t base = 0;
  const char* name = "";
  bool loads_for_python = false;
  std::uintptr_t relro_begin = 0, relro_end = 0;  // pages that the linker made read-only
  const Elf64_Sym* symbols = nullptr;
  const char* strings = nullptr;
  const std::uint32_t* gnu_hash = nullptr;
  std::span<const Elf64_Rela> relocations, plt_relocations;
};

std::mutex mutex;
std::vector<Seen> seen;
std::vector<Replaced> replaced;
unsigned long long adds_seen = 0, subs_seen = 0;

std::uintptr_t page_size() {
  static const auto size = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

// The loader writes run-time addresses into PT_DYNAMIC, but not for every object (the vDSO keeps offsets).
template <typename T>
const T* at(const Object& object, Elf64_Addr address) {
  return reinterpret_cast<const T*>(address < object.base ? object.base + address : address);
}

void read_dynamic(Object& object, const Elf64_Dyn* dynamic) {
  const Elf64_Rela *table = nullptr, *plt = nullptr;
  std::size_t table_bytes = 0, plt_bytes = 0, relative = 0;
  for (; dynamic->d_tag != DT_NULL; ++dynamic) {
    const Elf64_Addr value = dynamic->d_un.d_ptr;
    switch (dynamic->d_tag) {
      case DT_SYMTAB:
        object.symbols = at<Elf64_Sym>(object, value);
        break;
      case DT_STRTAB:
        object.strings = at<char>(object, value);
        break;
      case DT_GNU_HASH:
        object.gnu_hash = at<std::uint32_t>(object, value);
        break;
      case DT_RELA:
        table = at<Elf64_Rela>(object, value);
        break;
      case DT_RELASZ:
        table_bytes = value;
        break;
      case DT_RELACOUNT:
        relative = value;
        break;  // these come first and name no symbol
      case DT_JMPREL:
        plt = at<Elf64_Rela>(object, value);
        break;
      case DT_PLTRELSZ:
        plt_bytes = value;
        break;
      default:
        break;
    }
  }
  const std::size_t count = table_bytes / sizeof(Elf64_Rela);
  if (table != nullptr && relative <= count) object.relocations = {table + relative, count - relative};
  if (plt != nullptr) object.plt_relocations = {plt, plt_bytes / sizeof(Elf64_Rela)};
}

bool loads_for_python(std::string_view name) {
  return name.empty() || name.find("/libpython") != name.npos || name.find("/_ctypes.") != name.npos;
}

Object object_of(const dl_phdr_info& info) {
  Object object;
  object.base = info.dlpi_addr;
  object.name = info.dlpi_name != nullptr ? info.dlpi_name : "";
  object.loads_for_python = loads_for_python(object.name);
  const Elf64_Dyn* dynamic = nullptr;
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    const Elf64_Phdr& part = info.dlpi_phdr[i];
    const std::uintptr_t begin = object.base + part.p_vaddr;
    if (part.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const Elf64_Dyn*>(begin);
    if (part.p_type == PT_GNU_RELRO) {
      object.relro_begin = begin & ~(page_size() - 1);
      object.relro_end = (begin + part.p_memsz) & ~(page_size() - 1);
    }
  }
  if (dynamic != nullptr) read_dynamic(object, dynamic);
  return object;
}

const Replacement* find(const Object& object, std::span<const Replacement> replacements, std::uint32_t symbol) {
  const char* name = object.strings + object.symbols[symbol].st_name;
  for (const Replacement& one : replacements) {
    if (one.loaders && !object.loads_for_python) continue;
    if (std::strcmp(one.name, name) == 0) return &one;
  }
  return nullptr;
}

// False when the object surely imports none of them: imported symbols come before those in its hash table, and a
// look at their names spares the relocations of the big libraries (200,000 in libtorch_cpu).
bool may_import(const Object& object, std::span<const Replacement> replacements) {
  if (object.gnu_hash == nullptr) return true;
  const std::uint32_t buckets = object.gnu_hash[0], first_hashed = object.gnu_hash[1], bloom = object.gnu_hash[2];
  const std::uint32_t* bucket = object.gnu_hash + 4 + 2 * bloom;
  if (std::all_of(bucket, bucket + buckets, [](std::uint32_t chain) { return chain == 0; })) return true;
  for (std::uint32_t symbol = 1; symbol < first_hashed; ++symbol) {
    if (find(object, replacements, symbol) != nullptr) return true;
  }
  return false;
}

void fill(const Object& object, Slot* slot, void* function) {
  const auto address = reinterpret_cast<std::uintptr_t>(slot);
  const bool read_only = address >= object.relro_begin && address < object.relro_end;
  void* page = reinterpret_cast<void*>(address & ~(page_size() - 1));
  if (read_only && ::mprotect(page, page_size(), PROT_READ | PROT_WRITE) != 0) return;
  std::atomic_ref<Slot>(*slot).store(function, std::memory_order_release);
  if (read_only) ::mprotect(page, page_size(), PROT_READ);
}

void replace_in(const Object& object, std::span<const Replacement> replacements) {
  if (object.symbols == nullptr || object.strings == nullptr || !may_import(object, replacements)) return;
  for (const auto& table : {object.plt_relocations, object.relocations}) {
    for (const Elf64_Rela& relocation : table) {
      const auto symbol = static_cast<std::uint32_t>(ELF64_R_SYM(relocation.r_info));
      const auto kind = static_cast<std::uint32_t>(ELF64_R_TYPE(relocation.r_info));
      if (symbol == 0 || std::find(std::begin(kSlotKinds), std::end(kSlotKinds), kind) == std::end(kSlotKinds))
        continue;
      if (object.symbols[symbol].st_shndx != SHN_UNDEF) continue;
      const Replacement* one = find(object, replacements, symbol);
      if (one == nullptr) continue;
      Slot* slot = reinterpret_cast<Slot*>(object.base + relocation.r_offset);
      replaced.push_back({slot, *slot, one->function});
      fill(object, slot, one->function);
    }
  }
}

std::uintptr_t own_base() {
  Dl_info info{};
  ::dladdr(reinterpret_cast<void*>(&replace_imports), &info);
  return reinterpret_cast<std::uintptr_t>(info.dli_fbase);
}

// A thread may be at work here while another one forks: the child gets the tables whole, and the mutex free.
void lock_around_forks() {
  static const int registered = ::pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  static_cast<void>(registered);
}

struct Pass {
  std::span<const Replacement> replacements;
  std::vector<Seen> present;
  unsigned long long adds = 0, subs = 0;
};

int visit(dl_phdr_info* info, std::size_t, void* data) {
  auto& pass = *static_cast<Pass*>(data);
  if (info->dlpi_adds == adds_seen && info->dlpi_subs == subs_seen) return 1;
  Seen one{info->dlpi_addr, info->dlpi_name != nullptr ? info->dlpi_name : ""};
  static const std::uintptr_t own = own_base();
  const bool is_new = std::find(seen.begin(), seen.end(), one) == seen.end();
  if (is_new && one.base != own) replace_in(object_of(*info), pass.replacements);
  pass.present.push_back(std::move(one));
  pass.adds = info->dlpi_adds;
  pass.subs = info->dlpi_subs;
  return 0;
}

// Puts back what stands in this object; the slots of one that is gone are no memory of ours any more.
int restore_in(dl_phdr_info* info, std::size_t, void*) {
  const Object object = object_of(*info);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const Elf64_Phdr& part = info->dlpi_phdr[i];
    if (part.p_type != PT_LOAD) continue;
    const std::uintptr_t begin = object.base + part.p_vaddr, end = begin + part.p_memsz;
    for (const Replaced& one : replaced) {
      const auto address = reinterpret_cast<std::uintptr_t>(one.slot);
      if (address >= begin && address < end && *one.slot == one.ours) fill(object, one.slot, one.original);
    }
  }
  return 0;
}

}  // namespace

void replace_imports(std::span<const Replacement> replacements) {
  lock_around_forks();
  const std::lock_guard lock(mutex);
  Pass pass{replacements, {}};
  ::dl_iterate_phdr(visit, &pass);
  if (pass.present.empty()) return;
  seen = std::move(pass.present);
  adds_seen = pass.adds;
  subs_seen = pass.subs;
}

void restore_imports() {
  const std::lock_guard lock(mutex);
  ::dl_iterate_phdr(restore_in, nullptr);
  replaced.clear();
  seen.clear();
  adds_seen = subs_seen = 0;
}

}  // namespace overmind

// SPDX-License-Identifier: MIT
#include "kernel_ext/borrowed.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <optional>
#include <string_view>

#include "core/unique_fd.h"

namespace overmind {
namespace {

struct FileMap {
  std::uint64_t start, end, offset, dev, ino;
};

// PROCMAP_QUERY of Linux 6.11, which the headers of Debian do not have yet: struct procmap_query and what it says.
struct MapQuery {
  std::uint64_t size, query_flags, query_address;
  std::uint64_t start, end, flags, page_size, offset, ino;
  std::uint32_t dev_major, dev_minor, name_size, build_id_size;
  std::uint64_t name_address, build_id_address;
};
constexpr unsigned long kMapQuery = _IOWR('f', 17, MapQuery);
constexpr std::uint64_t kMapWritable = 1 << 1, kMapShared = 1 << 3, kMapOrNext = 1 << 4, kMapOfFile = 1 << 5;

constexpr char kMaps[] = "/proc/self/maps";

// Calls visit(FileMap, mode) for each mapping of a file in this process; mode is like "rw-p".
template <typename Visit>
void visit_all(Visit visit) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(kMaps, "re"), &std::fclose);
  if (file == nullptr) return;
  char* line = nullptr;
  std::size_t capacity = 0;
  while (::getline(&line, &capacity, file.get()) > 0) {
    FileMap map{};
    std::array<char, 5> mode{};
    unsigned major_number = 0, minor_number = 0;
    const int fields = std::sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %x:%x %" SCNu64, &map.start, &map.end,
                                   mode.data(), &map.offset, &major_number, &minor_number, &map.ino);
    if (fields != 7 || map.ino == 0) continue;
    map.dev = ::makedev(major_number, minor_number);
    visit(map, std::string_view(mode.data()));
  }
  std::free(line);  // NOLINT: getline's own allocation
}

// The private mappings of files in this process. A process with torch has 1,500 mappings, and to print and read them
// all takes 2.5 ms, which a first load would wait for; one question takes 1 us.
class FileMaps {
 public:
  // Null where no private mapping of a file holds `address`.
  std::optional<FileMap> at(std::uint64_t address) {
    if (asks_) {
      MapQuery query{};
      query.size = sizeof query;
      query.query_address = address;
      if (::ioctl(fd_.get(), kMapQuery, &query) == 0) return private_file(query);
      if (errno == ENOENT) return std::nullopt;
      asks_ = false;  // an older kernel doesn't know the question
      read_all();
    }
    const auto next = std::upper_bound(all_.begin(), all_.end(), address,
                                       [](std::uint64_t wanted, const FileMap& map) { return wanted < map.start; });
    if (next == all_.begin() || address >= std::prev(next)->end) return std::nullopt;
    return *std::prev(next);
  }

 private:
  static std::optional<FileMap> private_file(const MapQuery& query) {
    if ((query.flags & kMapShared) != 0 || query.ino == 0) return std::nullopt;
    return FileMap{query.start, query.end, query.offset, ::makedev(query.dev_major, query.dev_minor), query.ino};
  }

  void read_all() {
    visit_all([this](const FileMap& map, std::string_view mode) {
      if (mode.ends_with('p')) all_.push_back(map);
    });
  }

  const UniqueFd fd_{::open(kMaps, O_RDONLY | O_CLOEXEC)};
  bool asks_ = true;
  std::vector<FileMap> all_;  // ascending; of a kernel that can't be asked
};

constexpr std::uint64_t kPresent = 1ull << 63;
constexpr std::uint64_t kSwapped = 1ull << 62;
constexpr std::uint64_t kFilePage = 1ull << 61;

// PAGEMAP_SCAN of Linux 6.7, which the headers of Debian 12 do not have yet: struct pm_scan_arg and what it asks.
struct PageScan {
  std::uint64_t size, flags, start, end, walk_end, regions, regions_length, max_pages;
  std::uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
constexpr unsigned long kPagemapScan = _IOWR('f', 16, PageScan);
constexpr std::uint64_t kScanFile = 1 << 2, kScanPresent = 1 << 3, kScanSwapped = 1 << 4;

// As unwritten(); nothing where the kernel doesn't know the question. The weights of Stable Diffusion 1.5, untouched:
// 0.03 ms, 0.6 ms when all were read; pagemap's entries take 4 ms either way, which a first load would wait for.
std::optional<bool> scan_unwritten(int pagemap, std::uint64_t start, std::uint64_t end) {
  std::array<std::uint64_t, 3> region;
  PageScan scan{};
  scan.size = sizeof scan;
  scan.start = start;
  scan.end = end;
  scan.regions = reinterpret_cast<std::uintptr_t>(region.data());
  scan.regions_length = 1;
  scan.max_pages = 1;
  scan.category_inverted = scan.category_mask = kScanFile;  // not of the file,
  scan.category_anyof_mask = kScanPresent | kScanSwapped;   // and there
  scan.return_mask = kScanFile;
  const int found = ::ioctl(pagemap, kPagemapScan, &scan);
  if (found < 0) return std::nullopt;
  return found == 0;
}

// True when no page of [start, end) was copied for a write. A page that is not there was never touched, or
// was dropped because the file still holds it.
bool unwritten(int pagemap, std::uint64_t start, std::uint64_t end) {
  static const std::uint64_t page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t first = start / page, last = (end + page - 1) / page;
  if (const auto known = scan_unwritten(pagemap, first * page, last * page); known.has_value()) return *known;
  std::array<std::uint64_t, 8192> entries;
  for (std::uint64_t at = first; at < last;) {
    const std::size_t count = std::min<std::uint64_t>(entries.size(), last - at);
    const ssize_t got = ::pread(pagemap, entries.data(), count * 8, static_cast<off_t>(at * 8));
    if (got != static_cast<ssize_t>(count * 8)) return false;
    for (std::size_t i = 0; i < count; ++i)
      if ((entries[i] & (kPresent | kSwapped)) != 0 && (entries[i] & kFilePage) == 0) return false;
    at += count;
  }
  return true;
}

std::uint64_t nanoseconds(const timespec& time) {
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(time.tv_nsec);
}

}  // namespace

std::vector<Borrowable> find_borrowable(std::span<const Source> sources, std::uint64_t min_size) {
  std::vector<Borrowable> found;
  if (std::none_of(sources.begin(), sources.end(), [&](const Source& source) { return source.size >= min_size; }))
    return found;
  FileMaps maps;
  const UniqueFd pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  if (!pagemap.valid()) return found;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (sources[i].size < min_size) continue;
    const auto start = reinterpret_cast<std::uintptr_t>(sources[i].data);
    const std::uint64_t end = start + sources[i].size;
    const std::optional<FileMap> map = maps.at(start);
    if (!map || end > map->end || !unwritten(pagemap.get(), start, end)) continue;
    found.push_back({i, map->dev, map->ino, map->offset + (start - map->start)});
  }
  return found;
}

std::vector<FilePlace> files_mapped_for_writing() {
  std::vector<FilePlace> found;
  const UniqueFd maps(::open(kMaps, O_RDONLY | O_CLOEXEC));
  MapQuery query{};
  query.size = sizeof query;
  query.query_flags = kMapWritable | kMapShared | kMapOfFile | kMapOrNext;
  while (::ioctl(maps.get(), kMapQuery, &query) == 0) {
    found.push_back({::makedev(query.dev_major, query.dev_minor), query.ino});
    query.query_address = query.end;
  }
  if (errno == ENOENT) return found;
  found.clear();  // an older kernel doesn't know the question
  visit_all([&](const FileMap& map, std::string_view mode) {
    if (mode.ends_with('s') && mode[1] == 'w') found.push_back({map.dev, map.ino});
  });
  return found;
}

Result<std::shared_ptr<BorrowedFile>> BorrowedFile::map(const FileIdentity& identity) {
  const UniqueFd fd(::open(identity.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return errno_status("open " + identity.path);
  struct stat now {};
  if (::fstat(fd.get(), &now) != 0) return errno_status("fstat " + identity.path);
  if (!S_ISREG(now.st_mode) || now.st_dev != identity.dev || now.st_ino != identity.ino ||
      static_cast<std::uint64_t>(now.st_size) != identity.size || nanoseconds(now.st_mtim) != identity.mtime_ns ||
      nanoseconds(now.st_ctim) != identity.ctime_ns || identity.size == 0)
    return Status(Code::kInvalid, identity.path + " changed since it was recorded; the next load makes a new entry");
  // NORESERVE: nothing is written unless the user writes, and then page by page.
  void* data = ::mmap(nullptr, identity.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd.get(), 0);
  if (data == MAP_FAILED) return errno_status("mmap " + identity.path);
  return std::shared_ptr<BorrowedFile>(new BorrowedFile({static_cast<std::byte*>(data), identity.size}));
}

BorrowedFile::~BorrowedFile() { ::munmap(bytes_.data(), bytes_.size()); }

}  // namespace overmind

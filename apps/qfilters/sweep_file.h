#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "output.h"

namespace qfilters::cli {

/// A run of a sweep that is there or to come. No budget: a policy that keeps
/// every row.
struct SweepRun {
  std::string task;
  std::string policy;
  std::string budget;  ///< as it was asked for

  friend bool operator==(const SweepRun&, const SweepRun&) = default;
};

/// Keeps other sweeps out of an existing folder until it ends or its process
/// does. Throws Error kInvalidArgument while another has it, kFile when the
/// folder cannot be opened.
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& folder);
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

 private:
  int descriptor_;
};

/// The folder of a sweep: sweep.json with all that was run so far, and
/// report.html made from it. Both are replaced at once after every run, so that
/// whatever ends a sweep leaves both whole.
///
///   {"settings": {"command", "version", "model": {...}, "text", "filters":
///    {policy: fingerprint}, "machine": {...}, ...},
///    "tasks": {task: {"task", "options": [...], "planned": [...],
///              "runs": [as the task writes them], "failures": [...]}}}
class SweepFile {
 public:
  /// Reads what is below `folder`; nothing need be there. Throws Error kFile
  /// for a file that is no sweep.
  explicit SweepFile(const std::filesystem::path& folder);

  /// Says what the sweep is of; what it was of before must not differ where
  /// that would mix numbers: version, model, filters of a policy. Throws Error
  /// kInvalidArgument naming what differs; nothing changes then.
  void set_settings(const Json& settings);
  /// A task that is part of the sweep and how it runs. Runs that are there must
  /// have been made with the same options; throws as set_settings() does.
  void set_task(
      const std::string& task, const std::vector<std::string>& options);

  [[nodiscard]] bool has(const SweepRun& run) const;
  /// All finished runs of a task; an empty array for none.
  [[nodiscard]] const Json& runs(const std::string& task) const;
  [[nodiscard]] std::size_t failures() const;

  /// Nothing of these is written before save().
  void plan(const std::vector<SweepRun>& runs);
  void add(const std::string& task, const std::vector<Json>& runs);
  void fail(const SweepRun& run, const std::string& reason);

  /// Throws Error kFile.
  void save() const;

  [[nodiscard]] std::filesystem::path json_path() const;
  [[nodiscard]] std::filesystem::path report_path() const;

  [[nodiscard]] const Json& json() const noexcept { return json_; }

 private:
  std::filesystem::path folder_;
  Json json_;
};

}  // namespace qfilters::cli

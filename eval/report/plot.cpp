#include "eval/report/plot.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <fmt/core.h>

#include "eval/report/html.h"

namespace qfilters::eval::report {

namespace {

// The plot in its own units; the page scales it.
constexpr double kWidth = 520;
constexpr double kHeight = 340;
constexpr double kLeft = 52;
constexpr double kRight = 400;  // labels stand right of it
constexpr double kTop = 52;
constexpr double kBottom = 296;
constexpr double kLabelGap = 13.5;

struct Point {
  double x = 0;  // bytes
  double y = 0;
  std::string budget;
};

struct Line {
  std::string policy;
  std::vector<Point> points;
};

struct Reference {
  std::string policy;
  double y = 0;
  std::optional<double> bytes;
};

/// What is shown of each axis.
struct Frame {
  double x_low = 0, x_high = 0, y_low = 0, y_high = 0;

  [[nodiscard]] double x(double bytes) const {
    return kLeft + (kRight - kLeft) * (std::log(bytes) - std::log(x_low)) /
                       (std::log(x_high) - std::log(x_low));
  }

  [[nodiscard]] double y(double value) const {
    const double share = (value - y_low) / (y_high - y_low);
    return kBottom - (kBottom - kTop) * std::clamp(share, 0.0, 1.0);
  }

  [[nodiscard]] bool shows(double value) const {
    return value >= y_low && value <= y_high;
  }
};

std::vector<Line> lines_of(
    const std::vector<Result>& all, const Measure& measure) {
  std::vector<Line> lines;
  for (const Result& result : all) {
    const auto bytes = number(*result.run, {"kv_bytes", "peak"});
    const auto value = measure.of(*result.run);
    if (result.budget.empty() || !value || !bytes || *bytes <= 0) continue;
    if (lines.empty() || lines.back().policy != result.policy) {
      lines.push_back({result.policy, {}});
    }
    lines.back().points.push_back({*bytes, *value, result.budget});
  }
  for (Line& line : lines) {
    std::stable_sort(
        line.points.begin(), line.points.end(), [](auto& a, auto& b) {
          return a.x < b.x;
        });
  }
  return lines;
}

std::vector<Reference> references_of(
    const std::vector<Result>& all, const Measure& measure) {
  std::vector<Reference> out;
  for (const Result& result : all) {
    const auto value = measure.of(*result.run);
    if (!result.budget.empty() || !value) continue;
    out.push_back(
        {result.policy, *value, number(*result.run, {"kv_bytes", "peak"})});
  }
  return out;
}

/// Shows all of a share; of a loss what lies near the better ones, or a single
/// failure would press the others into one line.
void choose_values(
    Frame& frame, const Measure& measure, std::vector<double> values) {
  if (measure.share) {
    frame.y_low = 0;
    frame.y_high = 1;
    return;
  }
  std::sort(values.begin(), values.end());
  const double low = values.front();
  double high = values.back();
  if (measure.lower_is_better) {
    const double most = values[values.size() * 3 / 4] - low;
    if (most > 0) high = std::min(high, low + 2.5 * most);
  }
  const double margin =
      std::max((high - low) * 0.06, std::abs(high) * 1e-3 + 1e-6);
  frame.y_low = low - margin;
  frame.y_high = high + margin;
}

Frame frame_of(
    const std::vector<Line>& lines,
    const std::vector<Reference>& references,
    const Measure& measure) {
  std::vector<double> values;
  Frame frame{1e300, 0, 0, 0};
  for (const Line& line : lines) {
    for (const Point& point : line.points) {
      values.push_back(point.y);
      frame.x_low = std::min(frame.x_low, point.x);
      frame.x_high = std::max(frame.x_high, point.x);
    }
  }
  for (const Reference& reference : references) {
    values.push_back(reference.y);
  }
  frame.x_low /= 1.12;
  frame.x_high *= 1.12;
  choose_values(frame, measure, values);
  return frame;
}

/// 1, 2 or 5 times a power of ten, about `count` of them over a range.
double tick_step(double range, int count) {
  const double raw = range / count;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw) return factor * power;
  }
  return 10 * power;
}

std::string value_axis(const Frame& frame) {
  std::string out;
  const double step = tick_step(frame.y_high - frame.y_low, 5);
  const int digits =
      std::max(0, static_cast<int>(-std::floor(std::log10(step))));
  const auto first = static_cast<int>(std::ceil(frame.y_low / step));
  const auto last = static_cast<int>(std::floor(frame.y_high / step + 1e-6));
  for (int tick = first; tick <= last; ++tick) {
    const double value = step * tick;
    const double y = frame.y(value);
    out += fmt::format(
        "<path class=\"axis\" d=\"M{:.1f} {:.1f}H{:.1f}\"/><text x=\"{:.1f}\" "
        "y=\"{:.1f}\" text-anchor=\"end\">{}</text>",
        kLeft,
        y,
        kRight,
        kLeft - 6,
        y + 4,
        fixed(value, digits));
  }
  return out;
}

std::string bytes_axis(const Frame& frame) {
  constexpr double kMebi = 1 << 20;
  std::string out;
  double last = -1e9;
  for (int power = -10; power < 30; ++power) {
    for (const double factor : {1.0, 1.25, 1.5, 1.75}) {
      const double value = std::ldexp(factor, power) * kMebi;
      if (value < frame.x_low || value > frame.x_high) continue;
      const double x = frame.x(value);
      if (x - last < 52) continue;
      last = x;
      out += fmt::format(
          "<path class=\"axis\" d=\"M{:.1f} {:.1f}v5\"/><text x=\"{:.1f}\" "
          "y=\"{:.1f}\" text-anchor=\"middle\">{:.4g}</text>",
          x,
          kBottom,
          x,
          kBottom + 18,
          value / kMebi);
    }
  }
  return out + fmt::format(
                   "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">KV "
                   "cache at its peak, MiB (log scale)</text>",
                   (kLeft + kRight) / 2,
                   kBottom + 36);
}

std::string reference_lines(
    const std::vector<Reference>& references,
    const Frame& frame,
    const Measure& measure) {
  std::string out;
  double x = kLeft + 4;
  for (const Reference& reference : references) {
    const double y = frame.y(reference.y);
    const std::string label = fmt::format(
        "{} {}{}",
        reference.policy,
        fixed(reference.y, measure.digits),
        reference.bytes ? " (" + bytes_text(*reference.bytes) + ")" : "");
    out += fmt::format(
        "<path class=\"ref\" d=\"M{:.1f} {:.1f}H{:.1f}\"/>"
        "<text x=\"{:.1f}\" y=\"{:.1f}\">- - {}</text>",
        kLeft,
        y,
        kRight,
        x,
        kTop - 10,
        escape(label));
    x += 40 + 7.0 * static_cast<double>(label.size());
  }
  return out;
}

std::string draw_line(
    const Json& sweep,
    const Line& line,
    const Frame& frame,
    const Measure& measure,
    double label_y) {
  std::string path;
  std::string dots;
  for (const Point& point : line.points) {
    const double x = frame.x(point.x);
    const double y = frame.y(point.y);
    path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", x, y);
    dots += fmt::format(
        "<circle{} cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\"><title>{} {}: {}, "
        "{}</title></circle>",
        frame.shows(point.y) ? "" : " class=\"edge\"",
        x,
        y,
        line.policy == "auto" ? 4.5 : 3,
        escape(line.policy),
        escape(point.budget),
        fixed(point.y, measure.digits),
        bytes_text(point.x));
  }
  const Point& end = line.points.back();
  return fmt::format(
      "<g {}><path class=\"hit\" d=\"{}\"/><path d=\"{}\"/><path "
      "class=\"lead\" "
      "d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}\"/>{}<text x=\"{:.1f}\" "
      "y=\"{:.1f}\">{}</text></g>\n",
      marks(sweep, line.policy),
      path,
      path,
      frame.x(end.x),
      frame.y(end.y),
      kRight + 8,
      label_y,
      dots,
      kRight + 11,
      label_y + 4,
      escape(line.policy));
}

/// Where each line's name goes: beside its end, no two on one another.
std::vector<double> label_places(
    const std::vector<Line>& lines, const Frame& frame) {
  std::vector<std::size_t> order(lines.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto end_of = [&](std::size_t line) {
    return frame.y(lines[line].points.back().y);
  };
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
    return end_of(a) < end_of(b);
  });
  std::vector<double> wanted;
  wanted.reserve(order.size());
  for (const std::size_t line : order) {
    wanted.push_back(end_of(line));
  }
  const std::vector<double> placed =
      spread(wanted, kLabelGap, kTop, kBottom + 20);
  std::vector<double> places(lines.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    places[order[i]] = placed[i];
  }
  return places;
}

}  // namespace

std::vector<double> spread(
    std::vector<double> wanted, double gap, double low, double high) {
  double least = low;
  for (double& place : wanted) {
    place = std::max(place, least);
    least = place + gap;
  }
  double most = high;
  for (auto place = wanted.rbegin(); place != wanted.rend(); ++place) {
    *place = std::min(*place, most);
    most = *place - gap;
  }
  return wanted;
}

std::string quality_plot(const Json& sweep, const Measure& measure) {
  const std::vector<Result> all = results(sweep, measure.task);
  const std::vector<Line> lines = lines_of(all, measure);
  if (lines.empty()) return "";
  const std::vector<Reference> references = references_of(all, measure);
  const Frame frame = frame_of(lines, references, measure);
  const std::vector<double> labels = label_places(lines, frame);
  std::string drawn;
  std::string last;  // auto lies on top
  bool off = false;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    std::string& to = lines[i].policy == "auto" ? last : drawn;
    to += draw_line(sweep, lines[i], frame, measure, labels[i]);
    for (const Point& point : lines[i].points) {
      off = off || !frame.shows(point.y);
    }
  }
  const std::string title = fmt::format(
      "{} ({} is better)",
      measure.title,
      measure.lower_is_better ? "lower" : "higher");
  return fmt::format(
      "<figure><svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">"
      "<text class=\"title\" x=\"4\" y=\"18\">{}</text>{}{}{}\n{}{}</svg>"
      "<figcaption>{}{}</figcaption></figure>\n",
      kWidth,
      kHeight,
      escape(title),
      escape(title),
      value_axis(frame),
      bytes_axis(frame),
      reference_lines(references, frame, measure),
      drawn,
      last,
      escape(label_of(sweep, measure.task)),
      off ? ". Hollow points lie beyond the frame." : "");
}

}  // namespace qfilters::eval::report

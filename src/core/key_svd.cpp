#include "core/key_svd.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <Eigen/Dense>

namespace qfilters {

namespace {

class GroupScorer final : public Scorer {
 public:
  GroupScorer(std::vector<float> directions, int sign)
      : directions_(std::move(directions)), sign_(static_cast<float>(sign)) {}

  [[nodiscard]] std::string_view name() const noexcept override {
    return "qfilters-keysvd";
  }

  void score(const ScoreInput& in, std::span<float> out) const override {
    const std::size_t group = in.batch * in.keys.heads + in.kv_head;
    score_projection(
        in.keys,
        in.batch,
        in.kv_head,
        std::span(directions_).subspan(group * in.keys.dim, in.keys.dim),
        sign_,
        out);
  }

 private:
  std::vector<float> directions_;
  float sign_;
};

}  // namespace

std::vector<float> key_direction(
    std::span<const float> keys, std::size_t rows, std::size_t dim) {
  using Matrix =
      Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const auto n = static_cast<Eigen::Index>(rows);
  const auto d = static_cast<Eigen::Index>(dim);
  const Eigen::Map<const Matrix> given(keys.data(), n, d);
  const Eigen::MatrixXd centred =
      given.cast<double>().rowwise() - given.cast<double>().colwise().mean();
  std::vector<float> direction(dim, std::numeric_limits<float>::quiet_NaN());
  if (!centred.allFinite()) return direction;
  const Eigen::MatrixXd covariance =
      centred.transpose() * centred /
      static_cast<double>(std::max<std::size_t>(rows - 1, 1));
  Eigen::VectorXd top = Eigen::VectorXd::Unit(d, d - 1);
  if (!covariance.isZero(0.0)) {
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(covariance);
    top = solver.eigenvectors().col(d - 1);  // eigenvalues ascend
  }
  Eigen::Index largest = 0;
  top.cwiseAbs().maxCoeff(&largest);
  if (top[largest] < 0) top = -top;
  top /= std::max(top.norm(), 1e-12);
  for (Eigen::Index i = 0; i < d; ++i) {
    direction[static_cast<std::size_t>(i)] = static_cast<float>(top[i]);
  }
  return direction;
}

std::shared_ptr<const Scorer> make_group_scorer(
    std::vector<float> directions, int sign) {
  return std::make_shared<GroupScorer>(std::move(directions), sign);
}

}  // namespace qfilters

// Made by tools/fused_programs.py from the Python of the optimizers; do not edit.
#pragma once

#include "ops/row_update/chunk.h"

namespace meseta {

template <typename T>
void sgd(Chunk<T>& x) {
  const Vec u0 = broadcast(x.uniforms[0]);
  x.each_element([&](const auto& at) {
    const Vec v0 = at.weight();
    const Vec g = at.gradient();
    const Vec v1 = u0 * g;
    const Vec v2 = v0 - v1;
    at.put_weight(v2);
  });
}

template <typename T>
void sgd_momentum(Chunk<T>& x) {
  const Vec u0 = broadcast(x.uniforms[0]);
  const Vec u1 = broadcast(x.uniforms[1]);
  x.each_element([&](const auto& at) {
    const Vec v0 = at.state(0);
    const Vec v1 = u0 * v0;
    const Vec g = at.gradient();
    const Vec v2 = g + v1;
    at.put_state(0, v2);
    const Vec v4 = at.weight();
    const Vec v5 = u1 * v2;
    const Vec v6 = v4 - v5;
    at.put_weight(v6);
  });
}

template <typename T>
void adagrad(Chunk<T>& x) {
  const Vec u0 = broadcast(x.uniforms[0]);
  const Vec u1 = broadcast(x.uniforms[1]);
  x.each_element([&](const auto& at) {
    const Vec v0 = at.state(0);
    const Vec g = at.gradient();
    const Vec v1 = g * g;
    const Vec v2 = v0 + v1;
    const Vec v3 = sqrt(v2);
    const Vec v4 = u0 + v3;
    const Vec v5 = u1 * g;
    const Vec v6 = v5 / v4;
    const Vec v7 = at.weight();
    const Vec v8 = v7 - v6;
    at.put_weight(v8);
    at.put_state(0, v2);
  });
}

template <typename T>
void rowwise_adagrad(Chunk<T>& x) {
  const Vec u0 = broadcast(x.uniforms[0]);
  const Vec u1 = broadcast(x.uniforms[1]);
  const Vec u2 = broadcast(x.uniforms[2]);
  const Vec u3 = broadcast(x.uniforms[3]);
  x.each_element([&](const auto& at) {
    const Vec g = at.gradient();
    const Vec v0 = g * g;
    at.add(0, v0);
  });
  x.sum(0, 0);
  x.load_row_state(0, 1);
  x.each_row([&](int64_t k) {
    const Vec v1 = x.row(0, k);
    const Vec v2 = v1 / u0;
    const Vec v3 = x.row(1, k);
    const Vec v4 = v3 + v2;
    x.put_row(3, k, v4);
    const Vec v7 = sqrt(v4);
    const Vec v8 = u1 + v7;
    const Vec v9 = u2 / v8;
    const Vec v10 = u3 * v9;
    x.put_row(2, k, v10);
  });
  x.store_row_state(0, 3);
  x.each_element([&](const auto& at) {
    const Vec v6 = at.weight();
    const Vec g = at.gradient();
    const Vec v10 = at.row(2);
    const Vec v11 = g * v10;
    const Vec v12 = v6 - v11;
    at.put_weight(v12);
  });
}

template <typename T>
void adam(Chunk<T>& x) {
  const Vec u0 = broadcast(x.uniforms[0]);
  const Vec u1 = broadcast(x.uniforms[1]);
  const Vec u2 = broadcast(x.uniforms[2]);
  const Vec u3 = broadcast(x.uniforms[3]);
  const Vec u4 = broadcast(x.uniforms[4]);
  const Vec u5 = broadcast(x.uniforms[5]);
  const Vec u6 = broadcast(x.uniforms[6]);
  const Vec u7 = broadcast(x.uniforms[7]);
  x.each_element([&](const auto& at) {
    const Vec v0 = at.state(0);
    const Vec v1 = u0 * v0;
    const Vec g = at.gradient();
    const Vec v2 = u1 * g;
    const Vec v3 = v1 + v2;
    at.put_state(0, v3);
    const Vec v5 = v3 / u2;
    const Vec v6 = u3 * v5;
    const Vec v7 = at.state(1);
    const Vec v8 = u4 * v7;
    const Vec v9 = g * g;
    const Vec v10 = u5 * v9;
    const Vec v11 = v8 + v10;
    const Vec v12 = v11 / u6;
    const Vec v13 = sqrt(v12);
    const Vec v14 = u7 + v13;
    const Vec v15 = v6 / v14;
    const Vec v16 = at.weight();
    const Vec v17 = v16 - v15;
    at.put_weight(v17);
    at.put_state(1, v11);
  });
}

template <typename T>
void adamw(Chunk<T>& x) {
  const Vec u0 = broadcast(x.uniforms[0]);
  const Vec u1 = broadcast(x.uniforms[1]);
  const Vec u2 = broadcast(x.uniforms[2]);
  const Vec u3 = broadcast(x.uniforms[3]);
  const Vec u4 = broadcast(x.uniforms[4]);
  const Vec u5 = broadcast(x.uniforms[5]);
  const Vec u6 = broadcast(x.uniforms[6]);
  const Vec u7 = broadcast(x.uniforms[7]);
  const Vec u8 = broadcast(x.uniforms[8]);
  x.each_element([&](const auto& at) {
    const Vec v0 = at.state(0);
    const Vec v1 = u0 * v0;
    const Vec g = at.gradient();
    const Vec v2 = u1 * g;
    const Vec v3 = v1 + v2;
    at.put_state(0, v3);
    const Vec v5 = at.state(1);
    const Vec v6 = u4 * v5;
    const Vec v7 = g * g;
    const Vec v8 = u5 * v7;
    const Vec v9 = v6 + v8;
    at.put_state(1, v9);
    const Vec v11 = v3 / u2;
    const Vec v12 = u3 * v11;
    const Vec v13 = v9 / u6;
    const Vec v14 = sqrt(v13);
    const Vec v15 = u7 + v14;
    const Vec v16 = v12 / v15;
    const Vec v17 = at.weight();
    const Vec v18 = u8 * v17;
    const Vec v19 = v17 - v18;
    const Vec v20 = v19 - v16;
    at.put_weight(v20);
  });
}

template <typename T>
void rowwise_adam(Chunk<T>& x) {
  const Vec u0 = broadcast(x.uniforms[0]);
  const Vec u1 = broadcast(x.uniforms[1]);
  const Vec u2 = broadcast(x.uniforms[2]);
  const Vec u3 = broadcast(x.uniforms[3]);
  const Vec u4 = broadcast(x.uniforms[4]);
  const Vec u5 = broadcast(x.uniforms[5]);
  const Vec u6 = broadcast(x.uniforms[6]);
  const Vec u7 = broadcast(x.uniforms[7]);
  const Vec u8 = broadcast(x.uniforms[8]);
  x.each_element([&](const auto& at) {
    const Vec g = at.gradient();
    const Vec v2 = g * g;
    at.add(0, v2);
  });
  x.sum(0, 1);
  x.load_row_state(1, 0);
  x.each_row([&](int64_t k) {
    const Vec v0 = x.row(0, k);
    const Vec v1 = u4 * v0;
    const Vec v3 = x.row(1, k);
    const Vec v4 = v3 / u5;
    const Vec v5 = u6 * v4;
    const Vec v6 = v1 + v5;
    x.put_row(3, k, v6);
    const Vec v15 = v6 / u7;
    const Vec v16 = sqrt(v15);
    const Vec v17 = u8 + v16;
    x.put_row(2, k, v17);
  });
  x.store_row_state(1, 3);
  x.each_element([&](const auto& at) {
    const Vec v8 = at.state(0);
    const Vec v9 = u0 * v8;
    const Vec g = at.gradient();
    const Vec v10 = u1 * g;
    const Vec v11 = v9 + v10;
    at.put_state(0, v11);
    const Vec v13 = v11 / u2;
    const Vec v14 = u3 * v13;
    const Vec v17 = at.row(2);
    const Vec v18 = v14 / v17;
    const Vec v19 = at.weight();
    const Vec v20 = v19 - v18;
    at.put_weight(v20);
  });
}

template <typename T>
void lamb(Chunk<T>& x) {
  const Vec u0 = broadcast(x.uniforms[0]);
  const Vec u1 = broadcast(x.uniforms[1]);
  const Vec u2 = broadcast(x.uniforms[2]);
  const Vec u3 = broadcast(x.uniforms[3]);
  const Vec u4 = broadcast(x.uniforms[4]);
  const Vec u5 = broadcast(x.uniforms[5]);
  const Vec u6 = broadcast(x.uniforms[6]);
  const Vec u7 = broadcast(x.uniforms[7]);
  const Vec u8 = broadcast(x.uniforms[8]);
  x.each_element([&](const auto& at) {
    const Vec v0 = at.state(0);
    const Vec v1 = u0 * v0;
    const Vec g = at.gradient();
    const Vec v2 = u1 * g;
    const Vec v3 = v1 + v2;
    at.put_state(0, v3);
    const Vec v5 = at.state(1);
    const Vec v6 = u3 * v5;
    const Vec v7 = g * g;
    const Vec v8 = u4 * v7;
    const Vec v9 = v6 + v8;
    at.put_state(1, v9);
    const Vec v11 = v3 / u2;
    const Vec v12 = v9 / u5;
    const Vec v13 = sqrt(v12);
    const Vec v14 = u6 + v13;
    const Vec v15 = v11 / v14;
    at.keep(0, v15);
    const Vec v16 = v15 * v15;
    const Vec v19 = at.weight();
    const Vec v20 = v19 * v19;
    at.add(0, v16);
    at.add(1, v20);
  });
  x.sum(0, 0);
  x.sum(1, 1);
  x.each_row([&](int64_t k) {
    const Vec v17 = x.row(0, k);
    const Vec v18 = sqrt(v17);
    const Vec v21 = x.row(1, k);
    const Vec v22 = sqrt(v21);
    const Vec v23 = v22 / v18;
    const Vec v24 = where_positive(v17, v23, u7);
    const Vec v25 = where_positive(v21, v24, u7);
    const Vec v26 = u8 * v25;
    x.put_row(2, k, v26);
  });
  x.each_element([&](const auto& at) {
    const Vec v15 = at.kept(0);
    const Vec v26 = at.row(2);
    const Vec v27 = v15 * v26;
    const Vec v19 = at.weight();
    const Vec v28 = v19 - v27;
    at.put_weight(v28);
  });
}

template <typename T>
void rowwise_lamb(Chunk<T>& x) {
  const Vec u0 = broadcast(x.uniforms[0]);
  const Vec u1 = broadcast(x.uniforms[1]);
  const Vec u2 = broadcast(x.uniforms[2]);
  const Vec u3 = broadcast(x.uniforms[3]);
  const Vec u4 = broadcast(x.uniforms[4]);
  const Vec u5 = broadcast(x.uniforms[5]);
  const Vec u6 = broadcast(x.uniforms[6]);
  const Vec u7 = broadcast(x.uniforms[7]);
  const Vec u8 = broadcast(x.uniforms[8]);
  const Vec u9 = broadcast(x.uniforms[9]);
  x.each_element([&](const auto& at) {
    const Vec g = at.gradient();
    const Vec v7 = g * g;
    const Vec v21 = at.weight();
    const Vec v22 = v21 * v21;
    at.add(0, v7);
    at.add(1, v22);
  });
  x.sum(0, 1);
  x.sum(1, 4);
  x.load_row_state(1, 0);
  x.each_row([&](int64_t k) {
    const Vec v5 = x.row(0, k);
    const Vec v6 = u3 * v5;
    const Vec v8 = x.row(1, k);
    const Vec v9 = v8 / u4;
    const Vec v10 = u5 * v9;
    const Vec v11 = v6 + v10;
    x.put_row(6, k, v11);
    const Vec v14 = v11 / u6;
    const Vec v15 = sqrt(v14);
    const Vec v16 = u7 + v15;
    x.put_row(2, k, v16);
  });
  x.store_row_state(1, 6);
  x.each_element([&](const auto& at) {
    const Vec v0 = at.state(0);
    const Vec v1 = u0 * v0;
    const Vec g = at.gradient();
    const Vec v2 = u1 * g;
    const Vec v3 = v1 + v2;
    at.put_state(0, v3);
    const Vec v13 = v3 / u2;
    const Vec v16 = at.row(2);
    const Vec v17 = v13 / v16;
    at.keep(0, v17);
    const Vec v18 = v17 * v17;
    at.add(0, v18);
  });
  x.sum(0, 3);
  x.each_row([&](int64_t k) {
    const Vec v19 = x.row(3, k);
    const Vec v20 = sqrt(v19);
    const Vec v23 = x.row(4, k);
    const Vec v24 = sqrt(v23);
    const Vec v25 = v24 / v20;
    const Vec v26 = where_positive(v19, v25, u8);
    const Vec v27 = where_positive(v23, v26, u8);
    const Vec v28 = u9 * v27;
    x.put_row(5, k, v28);
  });
  x.each_element([&](const auto& at) {
    const Vec v17 = at.kept(0);
    const Vec v28 = at.row(5);
    const Vec v29 = v17 * v28;
    const Vec v21 = at.weight();
    const Vec v30 = v21 - v29;
    at.put_weight(v30);
  });
}

template <typename T>
void lars(Chunk<T>& x) {
  const Vec u0 = broadcast(x.uniforms[0]);
  const Vec u1 = broadcast(x.uniforms[1]);
  const Vec u2 = broadcast(x.uniforms[2]);
  const Vec u3 = broadcast(x.uniforms[3]);
  x.each_element([&](const auto& at) {
    const Vec v0 = at.weight();
    const Vec v1 = v0 * v0;
    const Vec g = at.gradient();
    const Vec v6 = g * g;
    at.add(0, v1);
    at.add(1, v6);
  });
  x.sum(0, 0);
  x.sum(1, 1);
  x.each_row([&](int64_t k) {
    const Vec v2 = x.row(0, k);
    const Vec v3 = sqrt(v2);
    const Vec v4 = u0 * v3;
    const Vec v5 = u1 * v3;
    const Vec v7 = x.row(1, k);
    const Vec v8 = sqrt(v7);
    const Vec v9 = v8 + v5;
    const Vec v10 = v4 / v9;
    const Vec v11 = where_positive(v9, v10, u2);
    const Vec v12 = where_positive(v3, v11, u2);
    const Vec v13 = u3 * v12;
    x.put_row(2, k, v13);
  });
  x.each_element([&](const auto& at) {
    const Vec g = at.gradient();
    const Vec v13 = at.row(2);
    const Vec v14 = g * v13;
    const Vec v0 = at.weight();
    const Vec v15 = v0 - v14;
    at.put_weight(v15);
  });
}

template <typename T>
void ftrl(Chunk<T>& x) {
  const Vec u0 = broadcast(x.uniforms[0]);
  const Vec u1 = broadcast(x.uniforms[1]);
  const Vec u2 = broadcast(x.uniforms[2]);
  x.each_element([&](const auto& at) {
    const Vec v0 = at.state(0);
    const Vec g = at.gradient();
    const Vec v1 = g * g;
    const Vec v2 = v0 + v1;
    at.put_state(0, v2);
    const Vec v4 = at.state(1);
    const Vec v5 = u0 * g;
    const Vec v6 = v4 + v5;
    const Vec v7 = sqrt(v2);
    const Vec v8 = sqrt(v0);
    const Vec v9 = v7 - v8;
    const Vec v10 = at.weight();
    const Vec v11 = v10 * v9;
    const Vec v12 = v6 - v11;
    const Vec v13 = sign(v12);
    const Vec v14 = u1 * v13;
    const Vec v15 = v14 - v12;
    const Vec v16 = u2 + v7;
    const Vec v17 = v15 / v16;
    const Vec v18 = abs(v12);
    const Vec v19 = where_positive(v18, v17, u1);
    at.put_weight(v19);
    at.put_state(1, v12);
  });
}

template <typename T>
void rmsprop(Chunk<T>& x) {
  const Vec u0 = broadcast(x.uniforms[0]);
  const Vec u1 = broadcast(x.uniforms[1]);
  const Vec u2 = broadcast(x.uniforms[2]);
  const Vec u3 = broadcast(x.uniforms[3]);
  x.each_element([&](const auto& at) {
    const Vec v0 = at.state(0);
    const Vec v1 = u0 * v0;
    const Vec g = at.gradient();
    const Vec v2 = g * g;
    const Vec v3 = u1 * v2;
    const Vec v4 = v1 + v3;
    const Vec v5 = sqrt(v4);
    const Vec v6 = u2 + v5;
    const Vec v7 = g / v6;
    const Vec v8 = u3 * v7;
    const Vec v9 = at.weight();
    const Vec v10 = v9 - v8;
    at.put_weight(v10);
    at.put_state(0, v4);
  });
}

template <typename T>
struct FusedProgram {
  std::vector<int32_t> instructions;
  void (*run)(Chunk<T>&);
};

template <typename T>
const std::vector<FusedProgram<T>>& fused_programs() {
  static const std::vector<FusedProgram<T>> programs{
    {{13, 1, -1, -1, -1, 2, 0, 128, 0, -1, 1, 0, 1, 0, -1, 16, -1, 0, -1, -1}, &sgd<T>},
    {{14, 1, 0, -1, -1, 2, 1, 128, 1, -1, 0, 0, 0, 1, -1, 17, -1, 0, 0, -1, 13, 1, -1, -1, -1, 2, 0, 129, 0, -1, 1, 0, 1, 0, -1, 16, -1, 0, -1, -1}, &sgd_momentum<T>},
    {{14, 1, 0, -1, -1, 2, 2, 0, 0, -1, 0, 1, 1, 2, -1, 7, 2, 1, -1, -1, 0, 2, 128, 2, -1, 2, 0, 129, 0, -1, 3, 0, 0, 2, -1, 13, 2, -1, -1, -1, 1, 0, 2, 0, -1, 16, -1, 0, -1, -1, 17, -1, 1, 0, -1}, &adagrad<T>},
    {{2, 1, 0, 0, -1, 12, 64, 1, -1, -1, 3, 64, 64, 128, -1, 14, 65, 0, -1, -1, 0, 64, 65, 64, -1, 17, -1, 64, 0, -1, 13, 1, -1, -1, -1, 7, 64, 64, -1, -1, 0, 64, 129, 64, -1, 3, 64, 130, 64, -1, 2, 64, 131, 64, -1, 2, 0, 0, 64, -1, 1, 0, 1, 0, -1, 16, -1, 0, -1, -1}, &rowwise_adagrad<T>},
    {{14, 1, 0, -1, -1, 2, 1, 128, 1, -1, 2, 2, 129, 0, -1, 0, 1, 1, 2, -1, 17, -1, 1, 0, -1, 3, 1, 1, 130, -1, 2, 1, 131, 1, -1, 14, 2, 1, -1, -1, 2, 2, 132, 2, -1, 2, 0, 0, 0, -1, 2, 0, 133, 0, -1, 0, 0, 2, 0, -1, 3, 2, 0, 134, -1, 7, 2, 2, -1, -1, 0, 2, 135, 2, -1, 3, 1, 1, 2, -1, 13, 2, -1, -1, -1, 1, 1, 2, 1, -1, 16, -1, 1, -1, -1, 17, -1, 0, 1, -1}, &adam<T>},
    {{14, 1, 0, -1, -1, 2, 1, 128, 1, -1, 2, 2, 129, 0, -1, 0, 1, 1, 2, -1, 17, -1, 1, 0, -1, 14, 2, 1, -1, -1, 2, 2, 132, 2, -1, 2, 0, 0, 0, -1, 2, 0, 133, 0, -1, 0, 0, 2, 0, -1, 17, -1, 0, 1, -1, 3, 1, 1, 130, -1, 2, 1, 131, 1, -1, 3, 0, 0, 134, -1, 7, 0, 0, -1, -1, 0, 0, 135, 0, -1, 3, 0, 1, 0, -1, 13, 1, -1, -1, -1, 2, 2, 136, 1, -1, 1, 1, 1, 2, -1, 1, 0, 1, 0, -1, 16, -1, 0, -1, -1}, &adamw<T>},
    {{14, 64, 1, -1, -1, 2, 64, 132, 64, -1, 2, 1, 0, 0, -1, 12, 65, 1, -1, -1, 3, 65, 65, 133, -1, 2, 65, 134, 65, -1, 0, 64, 64, 65, -1, 17, -1, 64, 1, -1, 14, 1, 0, -1, -1, 2, 1, 128, 1, -1, 2, 0, 129, 0, -1, 0, 0, 1, 0, -1, 17, -1, 0, 0, -1, 3, 0, 0, 130, -1, 2, 0, 131, 0, -1, 3, 64, 64, 135, -1, 7, 64, 64, -1, -1, 0, 64, 136, 64, -1, 3, 0, 0, 64, -1, 13, 1, -1, -1, -1, 1, 0, 1, 0, -1, 16, -1, 0, -1, -1}, &rowwise_adam<T>},
    {{14, 1, 0, -1, -1, 2, 1, 128, 1, -1, 2, 2, 129, 0, -1, 0, 1, 1, 2, -1, 17, -1, 1, 0, -1, 14, 2, 1, -1, -1, 2, 2, 131, 2, -1, 2, 0, 0, 0, -1, 2, 0, 132, 0, -1, 0, 0, 2, 0, -1, 17, -1, 0, 1, -1, 3, 1, 1, 130, -1, 3, 0, 0, 133, -1, 7, 0, 0, -1, -1, 0, 0, 134, 0, -1, 3, 0, 1, 0, -1, 2, 1, 0, 0, -1, 12, 64, 1, -1, -1, 7, 65, 64, -1, -1, 13, 1, -1, -1, -1, 2, 2, 1, 1, -1, 12, 66, 2, -1, -1, 7, 67, 66, -1, -1, 3, 65, 67, 65, -1, 11, 64, 64, 65, 135, 11, 64, 66, 64, 135, 2, 64, 136, 64, -1, 2, 0, 0, 64, -1, 1, 0, 1, 0, -1, 16, -1, 0, -1, -1}, &lamb<T>},
    {{14, 1, 0, -1, -1, 2, 1, 128, 1, -1, 2, 2, 129, 0, -1, 0, 1, 1, 2, -1, 17, -1, 1, 0, -1, 14, 64, 1, -1, -1, 2, 64, 131, 64, -1, 2, 0, 0, 0, -1, 12, 65, 0, -1, -1, 3, 65, 65, 132, -1, 2, 65, 133, 65, -1, 0, 64, 64, 65, -1, 17, -1, 64, 1, -1, 3, 0, 1, 130, -1, 3, 64, 64, 134, -1, 7, 64, 64, -1, -1, 0, 64, 135, 64, -1, 3, 0, 0, 64, -1, 2, 1, 0, 0, -1, 12, 64, 1, -1, -1, 7, 65, 64, -1, -1, 13, 1, -1, -1, -1, 2, 2, 1, 1, -1, 12, 66, 2, -1, -1, 7, 67, 66, -1, -1, 3, 65, 67, 65, -1, 11, 64, 64, 65, 136, 11, 64, 66, 64, 136, 2, 64, 137, 64, -1, 2, 0, 0, 64, -1, 1, 0, 1, 0, -1, 16, -1, 0, -1, -1}, &rowwise_lamb<T>},
    {{13, 1, -1, -1, -1, 2, 2, 1, 1, -1, 12, 64, 2, -1, -1, 7, 64, 64, -1, -1, 2, 65, 128, 64, -1, 2, 66, 129, 64, -1, 2, 2, 0, 0, -1, 12, 67, 2, -1, -1, 7, 67, 67, -1, -1, 0, 66, 67, 66, -1, 3, 65, 65, 66, -1, 11, 65, 66, 65, 130, 11, 64, 64, 65, 130, 2, 64, 131, 64, -1, 2, 0, 0, 64, -1, 1, 0, 1, 0, -1, 16, -1, 0, -1, -1}, &lars<T>},
    {{14, 1, 0, -1, -1, 2, 2, 0, 0, -1, 0, 2, 1, 2, -1, 17, -1, 2, 0, -1, 14, 3, 1, -1, -1, 2, 0, 128, 0, -1, 0, 0, 3, 0, -1, 7, 2, 2, -1, -1, 7, 1, 1, -1, -1, 1, 1, 2, 1, -1, 13, 3, -1, -1, -1, 2, 1, 3, 1, -1, 1, 0, 0, 1, -1, 9, 1, 0, -1, -1, 2, 1, 129, 1, -1, 1, 1, 1, 0, -1, 0, 2, 130, 2, -1, 3, 1, 1, 2, -1, 8, 2, 0, -1, -1, 11, 1, 2, 1, 129, 16, -1, 1, -1, -1, 17, -1, 0, 1, -1}, &ftrl<T>},
    {{14, 1, 0, -1, -1, 2, 1, 128, 1, -1, 2, 2, 0, 0, -1, 2, 2, 129, 2, -1, 0, 1, 1, 2, -1, 7, 2, 1, -1, -1, 0, 2, 130, 2, -1, 3, 0, 0, 2, -1, 2, 0, 131, 0, -1, 13, 2, -1, -1, -1, 1, 0, 2, 0, -1, 16, -1, 0, -1, -1, 17, -1, 1, 0, -1}, &rmsprop<T>},
  };
  return programs;
}

}  // namespace meseta

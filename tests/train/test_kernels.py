"""The time of a step is given to classes of kernels, every moment of it once."""

import pytest

from lacuna.train.kernels import CLASSES, IDLE, Interval, kernel_class, time_by_class

NAMES = {
    "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT": "matrix products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "matrix products",
    "void cutlass::device_kernel<cutlass_80_tensorop_bf16>": "matrix products",
    "triton_tem_fused_mm_3": "matrix products",
    "aten::addmm": "matrix products",
    "aten::mm": "matrix products",
    "aten::bmm": "matrix products",
    "aten::_grouped_mm": "matrix products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
    "void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "attention",
    "triton_tem_fused_flex_attention_0": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "gloo:all_reduce": "communication",
    "c10d::allreduce_": "communication",
    "Memcpy DtoD (Device -> Device)": "copies",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>": "copies",
    "aten::copy_": "copies",
    "triton_poi_fused__scaled_dot_product_flash_attention_mm_silu_1": "elementwise",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2": "elementwise",
    "multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "elementwise",
    "aten::mul": "elementwise",
    "aten::_softmax": "elementwise",
    "aten::sum": "elementwise",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_known_by_its_name(name: str) -> None:
    assert kernel_class(name) == NAMES[name]


def test_every_moment_counts_once_and_computing_comes_before_communication() -> None:
    intervals = [
        Interval(-5, 2, "matrix products"),  # begins before what is looked at
        Interval(1, 4, "communication"),  # from 2 on nothing is computed beside it
        Interval(6, 9, "elementwise"),
        Interval(7, 8, "attention"),
        Interval(9, 30, "copies"),  # ends after it
        Interval(40, 50, "copies"),  # is not in it
    ]
    counted, busy = time_by_class(intervals, 0, 10)
    assert counted == {
        "attention": 1,
        "matrix products": 2,
        "copies": 1,
        "elementwise": 2,
        "communication": 2,
        IDLE: 2,
    }
    assert sum(counted.values()) == 10
    assert busy["communication"] == 3
    assert busy["elementwise"] == 3
    assert busy.keys() == CLASSES.keys()


def test_without_a_kernel_all_is_idle() -> None:
    counted, busy = time_by_class([], 3, 7)
    assert counted[IDLE] == 4
    assert sum(counted.values()) == 4
    assert not any(busy.values())

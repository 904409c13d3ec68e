"""What the sweep leaves out of the libraries that it covers, and why."""

_REASONS: dict[str, dict[str, str]] = {
    "numpy": {
        "creates arrays or constants": """
            arange bartlett blackman empty empty_like eye from_dlpack
            frombuffer fromfile fromiter fromstring hamming hanning identity kaiser load
            mask_indices ones ones_like tril_indices tril_indices_from triu_indices
            triu_indices_from diag_indices diag_indices_from indices zeros zeros_like
        """,
        "integers or bits only": """
            bitwise_and bitwise_count bitwise_invert bitwise_left_shift bitwise_not
            bitwise_or bitwise_right_shift bitwise_xor gcd invert lcm left_shift
            packbits ravel_multi_index right_shift unpackbits unravel_index
        """,
        "about shapes, dtypes or text": """
            array_repr array_str broadcast_shapes can_cast dtype einsum_path finfo
            get_printoptions iinfo iscomplexobj isdtype isrealobj isscalar issubdtype
            iterable ndim printoptions promote_types result_type save savez
            set_printoptions shape size
        """,
        "its result's shape depends on values": "trim_zeros",
        "a class of arrays or a base class of functions": "ndarray ufunc object_",
        "a warning": "ComplexWarning",
    },
    "numpy.fft": {"creates arrays": "fftfreq rfftfreq"},
    "nn": {
        "its operands are quantized already": """
            get_scaled_dot_general_config scaled_dot_general scaled_matmul
        """
    },
    "lax": {
        "a class or a setting": """
            AccuracyMode ConvDimensionNumbers ConvGeneralDilatedDimensionNumbers
            DotAlgorithm DotAlgorithmPreset DotDimensionNumbers FftType
            GatherDimensionNumbers GatherScatterMode Precision PrecisionLike
            RaggedDotDimensionNumbers RandomAlgorithm RoundingMethod
            ScatterDimensionNumbers Tolerance
        """,
        "about shapes or dtypes": """
            broadcast_shapes conv_dimension_numbers conv_general_permutations
            conv_general_shape_tuple conv_shape_tuple conv_transpose_shape_tuple dtype
            padtype_to_pads reduce_window_shape_tuple shape_as_value
        """,
        "integers or bits only": """
            bitwise_and bitwise_not bitwise_or bitwise_xor clz mulhi population_count
            shift_left shift_right_arithmetic shift_right_logical
        """,
        "creates arrays": "broadcasted_iota empty iota rng_bit_generator",
        "communicates between devices, and needs several or a mesh": """
            axis_index axis_size pbroadcast pcast ppermute precv psend pshuffle
            psum_scatter pswapaxes ragged_all_to_all with_sharding_constraint
        """,
        "orders effects": "after_all create_token",
        "its operands are quantized already": "scaled_dot",
        "traces a program without running it": "stage",
    },
    "linen": {
        "quantizes by itself": """
            Fp8DirectDotGeneralOp Fp8DotGeneral Fp8DotGeneralOp Fp8Einsum
            NANOOFp8DotGeneralOp
        """,
        "a container, a base class or metadata": """
            DenyList FrozenDict LogicallyPartitioned Module Partitioned RNNCellBase
            Variable
        """,
        "masks, which are Boolean": """
            combine_masks make_attention_mask make_causal_mask
        """,
        "creates arrays": "ones ones_init zeros zeros_init",
        "handles variables, names or sharding": """
            add_metadata_axis apply compact compact_name_scope disable_named_call
            enable_named_call fold_rngs get_logical_axis_rules get_partition_spec
            get_sharding init init_with_output intercept_methods logical_axis_rules
            logical_to_mesh logical_to_mesh_axes logical_to_mesh_sharding map_variables
            merge_param named_call nowrap override_named_call set_logical_axis_rules
            share_scope tabulate unbox with_logical_constraint with_logical_partitioning
            with_partitioning
        """,
        "lifts a transform of JAX, which `transforms` and `lax` cover": """
            checkpoint cond custom_vjp grad jit jvp remat remat_scan scan switch
            value_and_grad vjp vmap while_loop
        """,
    },
    "equinox": {
        "handles state or modes": """
            Shared State StateIndex StatefulLayer delete_init_state inference_mode
            make_with_state
        """
    },
    "haiku": {
        "a container, a base class or a type": """
            Deferred EmbedLookupStyle GetterContext LSTMState
            LayerStackTransparencyMapping LiftWithStateUpdater MethodContext Module
            ModuleProtocol MultiTransformed MultiTransformedWithState MutableParams
            MutableState PRNGSequence Params RNNCore SetterContext State SupportsCall
            Transformed TransformedWithState
        """,
        "handles parameters, state, names or keys": """
            current_name custom_creator custom_getter custom_setter eval_shape
            force_name get_channel_index get_current_state get_initial_state
            get_parameter get_params get_state intercept_methods lift lift_with_state
            maybe_get_rng_sequence_state maybe_next_rng_key multi_transform
            multi_transform_with_state name_like name_scope next_rng_key next_rng_keys
            replace_rng_sequence_state reserve_rng_keys running_init set_state to_dot
            to_module transform transform_with_state transparent transparent_lift
            transparent_lift_with_state with_empty_state with_rng without_apply_rng
            without_state
        """,
        "acts on parameters outside of a loss": "EMAParamsTree SNParamsTree",
        "random integers": "multinomial",
        "does not initialize by itself": "while_loop",
    },
}

LEFT_OUT = {
    f"{prefix}.{name}": reason
    for prefix, reasons in _REASONS.items()
    for reason, names in reasons.items()
    for name in names.split()
}
"""Each public function that has no case, and the reason."""

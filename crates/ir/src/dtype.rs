//! Element types, named as numpy (with ml_dtypes) names them.

macro_rules! dtypes {
    ($($variant:ident $name:literal $bits:literal),* $(,)?) => {
        /// An element type that a device buffer can hold.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[allow(missing_docs)]
        pub enum DType { $($variant),* }

        impl DType {
            /// Every element type.
            pub const ALL: &'static [DType] = &[$(DType::$variant),*];

            /// Returns numpy's name of the type.
            pub const fn name(self) -> &'static str {
                match self { $(DType::$variant => $name),* }
            }

            /// Returns the width of one element in bits, as an array stores it on a host.
            pub const fn bits(self) -> u64 {
                match self { $(DType::$variant => $bits),* }
            }

            /// Returns the element type that numpy calls `name`.
            pub fn from_name(name: &str) -> Option<DType> {
                Self::ALL.iter().copied().find(|dtype| dtype.name() == name)
            }
        }
    };
}

dtypes! {
    Bool "bool" 8, S2 "int2" 8, S4 "int4" 8, S8 "int8" 8, S16 "int16" 16, S32 "int32" 32,
    S64 "int64" 64, U2 "uint2" 8, U4 "uint4" 8, U8 "uint8" 8, U16 "uint16" 16, U32 "uint32" 32,
    U64 "uint64" 64, F16 "float16" 16, F32 "float32" 32, F64 "float64" 64,
    BF16 "bfloat16" 16, C64 "complex64" 64, C128 "complex128" 128,
    F8E3M4 "float8_e3m4" 8, F8E4M3 "float8_e4m3" 8, F8E4M3Fn "float8_e4m3fn" 8,
    F8E4M3B11Fnuz "float8_e4m3b11fnuz" 8, F8E4M3Fnuz "float8_e4m3fnuz" 8,
    F8E5M2 "float8_e5m2" 8, F8E5M2Fnuz "float8_e5m2fnuz" 8, F8E8M0Fnu "float8_e8m0fnu" 8,
    F4E2M1Fn "float4_e2m1fn" 8, Token "token" 0, Str "T" 0,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_finds_its_type() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_name(dtype.name()), Some(*dtype));
        }
    }
}

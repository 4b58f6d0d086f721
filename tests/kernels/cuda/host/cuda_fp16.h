// Stands for CUDA's header of this name.
#pragma once
typedef _Float16 half;

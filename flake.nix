{
  description = "Muon and its kernels, for the Hugging Face Hub";

  inputs = {
    kernel-builder.url = "github:huggingface/kernels";
  };

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
      # The tests need them; the package itself needs torch alone.
      pythonCheckInputs =
        pkgs: with pkgs; [
          kernels
          numpy
          hypothesis
          expecttest
        ];
    };
}

# A library with headers of its own, two programs that are linked against it, and a test of both.
# The compiler is the machine's, which the sandbox lets in as it does /bin/sh.
let
  make = pause: rec {
    greet = compile "greet" ''
      gcc -fPIC -shared -Wl,-soname,libgreet.so -o libgreet.so ${./greet.c} -I${./include}
      mkdir -p $out/lib $dev
      cp libgreet.so $out/lib
      cp -r ${./include} $dev/include
    '' { outputs = [ "out" "dev" ]; };
    hello = program "hello" ./hello.c;
    bye = program "bye" ./bye.c;
    check = compile "check" ''
      ${hello}/bin/hello Nix > said
      ${bye}/bin/bye Nix >> said
      [ "$(cat said)" = "Hello, Nix. Bye, Nix." ] || exit 1
      cp said $out
    '' { };

    program = name: source: compile name ''
      sleep ${pause}
      mkdir -p $out/bin
      gcc -o $out/bin/${name} ${source} -I${greet.dev}/include -L${greet}/lib -lgreet \
        -Wl,-rpath,${greet}/lib
    '' { };
    compile = name: script: more: derivation ({
      inherit name;
      system = builtins.currentSystem;
      builder = "/bin/sh";
      args = [ "-ec" script ];
      PATH = "/bin:/usr/bin";
    } // more);
  };
in
make "0" // { slowly = make "2"; }

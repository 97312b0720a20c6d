# Completion of dmt in bash: eval "$(dmt completion bash)"
_dmt() {
  local IFS=$'\n'
  # shellcheck disable=SC2207  # mapfile needs bash 4
  COMPREPLY=($(COMP_WORDBREAKS="$COMP_WORDBREAKS" dmt __complete bash "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
  case "${COMPREPLY[0]-}" in
    *[=.]) compopt -o nospace 2>/dev/null ;;  # the value or the rest of the key follows
  esac
}
complete -o default -F _dmt dmt
